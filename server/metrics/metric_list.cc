#include "server/metrics/metric_list.h"

#include "base/check.h"

namespace attnd {
namespace {

struct MetricText {
  absl::string_view name;  // its last word but "total" is the unit
  const char* type;        // counter, gauge or histogram
  const char* labels;      // joined by ", "
  const char* help;        // a sentence or two
};

constexpr MetricText kMetrics[] = {
    {"attnd_requests_total", "counter", "method, code",
     "Requests answered, by gRPC code. Streamed calls count as Forward and Backward, here and "
     "below. Series of Forward and Backward exist from the start, but for codes that are the "
     "caller's fault; others exist from the first call on."},
    {"attnd_request_duration_seconds", "histogram", "method",
     "Time from the arrival of the whole request to the end of its answer. Series of other "
     "methods than Forward and Backward exist from the first call on."},
    {"attnd_request_stage_duration_seconds", "histogram", "method, stage",
     "Time of each stage of successful requests; the stages of a request add up to its "
     "duration."},
    {"attnd_requests_in_flight", "gauge", "method",
     "Requests that have arrived and are not answered."},
    {"attnd_request_tokens", "histogram", "method",
     "Query rows of an admitted request, added up over its batch."},
    {"attnd_rejected_requests_total", "counter", "reason",
     "Requests refused before any work, by reason."},
    {"attnd_refusal_duration_seconds", "histogram", "method",
     "Time of a refusal, invalid requests left out: from a stream's header, or the whole "
     "request, to the end of the answer."},
    {"attnd_cancelled_requests_total", "counter", "stage",
     "Admitted requests that the caller cancelled at this stage."},
    {"attnd_expired_requests_total", "counter", "stage",
     "Admitted requests whose deadline passed at this stage. Cancellations in the last 20 ms "
     "and 1 % of the time count too."},
    {"attnd_calls_cut_total", "counter", "method, stage, reason",
     "Calls of the service Attention that ended with DEADLINE_EXCEEDED because the peer did not "
     "send a streamed request (receive, for Forward and Backward) or read the reply (send): it "
     "moved no byte (idle), was too_slow, or took until --max_deadline_seconds (too_long)."},
    {"attnd_queue_depth", "gauge", "device, direction, priority",
     "Admitted requests that wait for a device slot."},
    {"attnd_queue_bytes", "gauge", "device, direction",
     "Staging memory that the waiting requests will need."},
    {"attnd_queue_duration_seconds", "histogram", "direction, priority",
     "Time from admission until a device slot takes the request."},
    {"attnd_queue_estimated_seconds", "gauge", "device",
     "Estimated time of all work that is admitted and not computed, of modules too. An autoscaler "
     "uses this series."},
    {"attnd_busy_ratio", "gauge", "",
     "Share of the devices' time that answered calls took, modules' too, of about the last ten "
     "seconds. An autoscaler uses it for training, whose workers wait for each answer."},
    {"attnd_batch_requests", "histogram", "direction", "Requests in one launch."},
    {"attnd_batch_tokens", "histogram", "direction", "Query rows in one launch."},
    {"attnd_kernel_duration_seconds", "histogram", "device, direction, dtype, kernel",
     "Time of the kernels of one launch, on a GPU by its own events. A series exists from the "
     "kernel's first launch on."},
    {"attnd_kernel_launches_total", "counter", "device, direction, dtype, kernel, head_dim",
     "Launches that succeeded. head_dim is the widest call's, rounded up to 32, 64, 96, 128 or "
     "256. A series exists from the first launch on."},
    {"attnd_kernel_flops_total", "counter", "device, direction",
     "Floating-point operations of launches; rate() gives the achieved FLOP/s."},
    {"attnd_kernel_failures_total", "counter", "device, direction",
     "Launches that failed in the engine."},
    {"attnd_cuda_errors_total", "counter", "device, error",
     "Launches on a GPU that the driver failed, by the driver's error. A series exists from the "
     "first error on."},
    {"attnd_gpu_up", "gauge", "device",
     "1 once the startup check has passed, 0 when the device is lost."},
    {"attnd_gpu_info", "gauge", "device, backend, name, architecture, uuid",
     "Always 1. Join by uuid with the series of dcgm-exporter."},
    {"attnd_hbm_device_total_bytes", "gauge", "device", "Memory of the GPU."},
    {"attnd_hbm_device_used_bytes", "gauge", "device",
     "Memory of the GPU that any process uses, as the driver says."},
    {"attnd_hbm_pool_reserved_bytes", "gauge", "device",
     "Memory of the GPU that the daemon reserved at its start; constant."},
    {"attnd_hbm_pool_used_bytes", "gauge", "device, purpose",
     "Memory of the pool in use: input, output and workspace of running launches; lease for "
     "residuals and modules."},
    {"attnd_hbm_pool_peak_used_bytes", "gauge", "device",
     "Largest use of the pool since the start."},
    {"attnd_hbm_pool_largest_free_block_bytes", "gauge", "device",
     "Largest free block of the pool."},
    {"attnd_hbm_pool_fragmentation_ratio", "gauge", "device",
     "1 - largest free block / all free memory of the pool. This is an upper bound, since the "
     "driver can map blocks side by side."},
    {"attnd_hbm_pool_allocations_total", "counter", "device",
     "Allocations in the pool, one for each launch or residual."},
    {"attnd_hbm_pool_allocation_failures_total", "counter", "device",
     "Launches that waited for memory of the pool, and residuals that found none."},
    {"attnd_hbm_admitted_bytes", "gauge", "device",
     "GPU memory promised to requests that are not computed yet."},
    {"attnd_h2d_bytes_total", "counter", "device", "Tensor bytes copied from the host to the GPU."},
    {"attnd_d2h_bytes_total", "counter", "device", "Tensor bytes copied from the GPU to the host."},
    {"attnd_stream_busy_seconds_total", "counter", "device, role",
     "Time in which a CUDA stream had work, by role: h2d, compute, d2h. A sum of their rates "
     "above 1 means overlap. Copies that run beside kernels of the same launch are left out."},
    {"attnd_admitted_bytes", "gauge", "",
     "Staging memory promised to requests, until their reply is sent."},
    {"attnd_call_bytes", "gauge", "",
     "Memory of all calls other than tensors, unread replies included; at most 224 MiB."},
    {"attnd_staging_pool_capacity_bytes", "gauge", "",
     "Size of the staging memory (--memory_limit_mib)."},
    {"attnd_staging_pool_used_bytes", "gauge", "", "Staging memory that holds tensors now."},
    {"attnd_staging_pool_peak_used_bytes", "gauge", "",
     "Largest use of the staging memory since the start."},
    {"attnd_shared_memory_bytes", "gauge", "",
     "Memory that callers of this host share with the daemon; at most "
     "--shared_memory_limit_mib."},
    {"attnd_shared_memory_regions", "gauge", "", "Regions of that shared memory."},
    {"attnd_shared_memory_connections", "gauge", "", "Callers that share memory; at most 256."},
    {"attnd_received_bytes_total", "counter", "transport",
     "Bytes of request messages of Forward and Backward over tcp or uds, and of tensors in "
     "shared memory (memfd)."},
    {"attnd_sent_bytes_total", "counter", "transport",
     "Bytes of reply messages of Forward and Backward over tcp or uds, and of tensors in shared "
     "memory (memfd)."},
    {"attnd_caller_requests_total", "counter", "caller, result",
     "Finished calls of identified callers, ok or error: Forward, Backward and the service "
     "Modules."},
    {"attnd_caller_bytes_total", "counter", "caller, direction",
     "Payload of these calls, received and sent, tensors in shared memory included."},
    {"attnd_caller_compute_seconds_total", "counter", "caller",
     "Device time of these callers' answered calls. Calls of one launch share its time by their "
     "work; modules count their own."},
    {"attnd_host_copy_bytes_total", "counter", "site",
     "Payload bytes that the daemon itself copied. landing: to or from the staging memory."},
    {"attnd_capture_bytes", "gauge", "",
     "Attention maps kept for callers; at most --mask_memory_mib."},
    {"attnd_captures_lost_total", "counter", "",
     "Calls that named an attention map which the daemon no longer keeps."},
    {"attnd_mask_cache_bytes", "gauge", "",
     "Mask descriptions that callers may name by their digest; at most --mask_memory_mib."},
    {"attnd_mask_cache_hits_total", "counter", "",
     "Calls that named a mask which the daemon keeps."},
    {"attnd_mask_cache_misses_total", "counter", "",
     "Calls that named a mask which the daemon does not keep."},
    {"attnd_mask_plan_bytes", "gauge", "", "Memory of compiled masks."},
    {"attnd_masks_compiled_total", "counter", "", "Masks compiled, once for each problem size."},
    {"attnd_mask_compile_seconds_total", "counter", "", "Time spent in compiling masks."},
    {"attnd_mask_calls_waiting", "gauge", "", "Calls that wait for their masks to be compiled."},
    {"attnd_leases_active", "gauge", "device", "Residuals kept now for a backward."},
    {"attnd_lease_bytes", "gauge", "device",
     "Memory of the residuals kept now. Device host is a part of the staging memory that "
     "attnd_admitted_bytes leaves out."},
    {"attnd_leases_granted_total", "counter", "device", "Residuals that were kept for a backward."},
    {"attnd_leases_refused_total", "counter", "",
     "Residuals not kept for lack of room; the forward succeeded."},
    {"attnd_leases_ended_total", "counter", "device, reason",
     "Residuals whose lease ended: released, expired, evicted, replaced (by a retry of the same "
     "forward) or device_lost."},
    {"attnd_lease_lifetime_seconds", "histogram", "", "Time from the grant of a lease to its end."},
    {"attnd_lease_lookups_total", "counter", "result",
     "Backward requests with a token: hit, or the reason why not: expired, evicted, released, "
     "unknown, wrong_replica, epoch_changed (the daemon restarted), forbidden, mismatch, "
     "device_lost."},
    {"attnd_modules", "gauge", "", "Modules that are registered."},
    {"attnd_module_bytes", "gauge", "device, kind",
     "Memory reserved for modules: weight, optimizer (and gradients), activation, workspace, "
     "other (copies in flight)."},
    {"attnd_module_calls_total", "counter", "code, method",
     "Calls of the service Modules that ended. The series of an error exists from its first "
     "occurrence on."},
    {"attnd_module_duration_seconds", "histogram", "device, direction, stage",
     "Time of the modules' Forward and Backward, by stage: queue (until their turn), compute. A "
     "module that spans devices counts as gpu0+gpu1. A series exists from the first call on."},
    {"attnd_module_rows_total", "counter", "direction", "Rows that modules computed."},
    {"attnd_module_flops_total", "counter", "device, direction",
     "Floating-point operations of the modules' linear ops."},
    {"attnd_recomputed_layers_total", "counter", "device",
     "Layers whose activations a Backward computed again."},
    {"attnd_module_saves_total", "counter", "result", "Saves of durable module state: ok, failed."},
    {"attnd_module_saved_bytes_total", "counter", "", "Bytes of the saves that succeeded."},
    {"attnd_durable_lag_steps", "gauge", "",
     "Steps that a restart would lose, of the module that would lose most."},
    {"attnd_state_recoveries_total", "counter", "result",
     "States that registrations found on disk: loaded, damaged (and not loaded). Both count "
     "when a damaged state has an older one that was loaded."},
    {"attnd_module_state_bytes", "gauge", "",
     "Size of the files in --module_state_dir, with those that registered modules may still "
     "write; at most --module_state_mib."},
    {"attnd_module_states_swept_total", "counter", "",
     "States deleted after --module_state_days without a registration."},
    {"attnd_layer_plans_total", "counter", "result",
     "Blocks of registered layers, with --fusion measured: measured, kept (found before)."},
    {"attnd_layer_plan_samples_total", "counter", "",
     "Parts of layers that were measured for these plans."},
    {"attnd_layer_plan_seconds_total", "counter", "",
     "Time that registrations took longer for it."},
    {"attnd_steps_total", "counter", "result",
     "Optimizer steps of modules: applied, skipped (not finite, or discarded), replayed (a "
     "retry), refused."},
    {"attnd_backward_replays_total", "counter", "",
     "Retried micro-batches: dx was computed again, no gradient was added."},
    {"attnd_upload_bytes_saved_total", "counter", "",
     "Tensor bytes that backward requests with a token did not have to send."},
    {"attnd_auth_failures_total", "counter", "reason",
     "Requests refused for their token: token_missing, token_invalid."},
    {"attnd_tls_certificate_expiry_timestamp_seconds", "gauge", "role",
     "Unix time at which the first certificate of --tls_cert (server) and of --tls_client_ca "
     "(client_ca) expires. Exists with TLS alone."},
    {"attnd_connections", "gauge", "transport",
     "Open connections of the gRPC ports (tcp) and sockets (uds); at most --max_connections."},
    {"attnd_connections_refused_total", "counter", "",
     "Connections closed at once because --max_connections were open."},
    {"attnd_resident_bytes", "gauge", "kind",
     "Resident memory by its holder: staging; tensors (modules, copies of tensors and states); "
     "heap (what malloc has given out); program; shared (by callers of this host); other (free "
     "memory that malloc keeps, stacks, drivers). They add up to process_resident_memory_bytes."},
    {"attnd_lent", "gauge", "",
     "1 while the GPUs are lent and calls are served, 0 while their owner has them. Exists with "
     "--lend alone."},
    {"attnd_given_back_total", "counter", "how",
     "Times that GPUs were given back to their owner: drained, or killed after "
     "--lend_within_seconds. Exists with --lend alone."},
    {"attnd_spans_exported_total", "counter", "",
     "Calls whose spans a collector has taken. Exists with --otlp_endpoint alone."},
    {"attnd_spans_dropped_total", "counter", "",
     "Calls whose spans no collector has taken, because it is slow or gone. Exists with "
     "--otlp_endpoint alone."},
    {"attnd_ready", "gauge", "", "1 while the health service says SERVING."},
    {"attnd_draining", "gauge", "", "1 from the first SIGTERM on."},
    {"attnd_build_info", "gauge", "version, revision, cpu_target",
     "Always 1. The labels say what runs."},
    {"process_cpu_seconds_total", "counter", "", "User and system CPU time of the process."},
    {"process_resident_memory_bytes", "gauge", "", "Resident memory of the process."},
    {"process_virtual_memory_bytes", "gauge", "",
     "Virtual memory of the process, all staging memory included, used or not."},
    {"process_open_fds", "gauge", "", "Open file descriptors of the process."},
    {"process_max_fds", "gauge", "", "Limit of open file descriptors."},
    {"process_start_time_seconds", "gauge", "", "Unix time at which the process started."},
    {"process_threads", "gauge", "", "Threads of the process."},
};

}  // namespace

const char* HelpOf(absl::string_view name) {
  for (const MetricText& metric : kMetrics) {
    if (metric.name == name) return metric.help;
  }
  CHECK(false) << name << " has no row in the list above";
  return "";
}

}  // namespace attnd
