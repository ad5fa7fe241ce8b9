#include "server/metrics/metrics.h"

#include <utility>

#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/metrics/metric_list.h"

namespace attnd {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

const Buckets& KernelBuckets() {
  static const Buckets buckets = {1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
                                  1e-2, 2e-2, 5e-2, 0.1,  0.2,  0.5,  1,    2,    5};
  return buckets;
}
// Two a decade: every daemon has these from the start, and a Prometheus has a thousand daemons.
const Buckets& StageBuckets() {
  static const Buckets buckets = {1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3};
  return buckets;
}
const Buckets& QueueBuckets() {
  static const Buckets buckets = {0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3};
  return buckets;
}
const Buckets& LifetimeBuckets() {
  static const Buckets buckets = {0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600};
  return buckets;
}
const Buckets& RequestBuckets() {
  static const Buckets buckets = {1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 60};
  return buckets;
}
Buckets PowersOfFour(double first, double last) {
  Buckets buckets;
  for (double bound = first; bound <= last; bound *= 4) buckets.push_back(bound);
  return buckets;
}

// Codes that the objective counts are there from the start, so that the first one is seen. Others
// come with the first call that ends so.
constexpr const char* kCodes[] = {"OK",          "UNKNOWN",           "INTERNAL",
                                  "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS"};
constexpr const char* kStageNames[kRequestStages] = {"receive", "queue", "h2d",
                                                     "kernel",  "d2h",   "send"};
constexpr Direction kDirections[] = {Direction::kForward, Direction::kBackward};
constexpr Priority kPriorityList[] = {Priority::kLow, Priority::kNormal, Priority::kHigh};

// Reasons of refusal → the label's value.
constexpr std::pair<absl::string_view, const char*> kRejectLabels[] = {
    {reason::kQueueFull, "queue_full"},
    {reason::kMemoryPressure, "staging_exhausted"},
    {reason::kHbmPressure, "hbm_exhausted"},
    {reason::kTenantQuota, "tenant_quota"},
    {reason::kDeadlineUnmeetable, "deadline_unmeetable"},
    {reason::kDraining, "draining"},
    {reason::kTooLargeForDevice, "too_large"},
    {reason::kReplyTooLarge, "too_large"},
    {reason::kMaskUnsupported, "unsupported"},
    {reason::kMaskTooComplex, "too_large"},
    {reason::kMaskUnknown, "mask_unknown"},
    {reason::kProblemUnsupported, "unsupported"},
    {reason::kLeaseLost, "lease_lost"},
    {reason::kEpochChanged, "lease_lost"},
    {reason::kWrongReplica, "lease_lost"},
    {reason::kLeaseMismatch, "lease_lost"},
    {reason::kLeaseNotOwned, "permission_denied"},
    {reason::kRegionUnknown, "region_unknown"},
    {reason::kTokenMissing, "unauthenticated"},
    {reason::kTokenInvalid, "unauthenticated"},
};

// Why a call was cut → the label's value.
constexpr std::pair<absl::string_view, const char*> kCutLabels[] = {
    {reason::kStreamIdle, "idle"},
    {reason::kStreamTooSlow, "too_slow"},
    {reason::kDeadlineExceededTransfer, "too_long"},
};

// Forward and Backward: series of the others come with their first call.
bool IsAttention(Method method) {
  return method == Method::kForward || method == Method::kBackward;
}

int At(Direction direction, Priority priority) {
  return static_cast<int>(direction) * kPriorities + static_cast<int>(priority);
}
std::string Name(absl::string_view text) { return std::string(text); }

prometheus::Labels CutLabels(Method method, WorkStage stage, const char* reason) {
  return {{"method", Name(MethodName(method))},
          {"stage", Name(WorkStageName(stage))},
          {"reason", reason}};
}
prometheus::Labels QueueLabels(Direction direction, Priority priority) {
  return {{"direction", Name(DirectionName(direction))},
          {"priority", Name(PriorityName(priority))}};
}

// "CUDA_ERROR_ILLEGAL_ADDRESS" in a driver's message; empty when there is none.
std::string CudaErrorIn(absl::string_view message) {
  const size_t begin = message.find("CUDA_ERROR_");
  if (begin == absl::string_view::npos) return "";
  absl::string_view name = message.substr(begin);
  return Name(name.substr(0, name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789")));
}

}  // namespace

absl::string_view MethodName(Method method) {
  constexpr absl::string_view kNames[kMethods] = {
      "Forward",         "Backward",    "GetServerInfo", "RenewResidual",
      "ReleaseResidual", "CompileMask", "BuildPattern",  "ReleaseCapture"};
  return kNames[static_cast<int>(method)];
}

absl::string_view WorkStageName(WorkStage stage) {
  constexpr absl::string_view kNames[kWorkStages] = {"receive", "queue", "kernel", "send"};
  return kNames[static_cast<int>(stage)];
}

absl::string_view LeaseEndName(LeaseEnd how) {
  constexpr absl::string_view kNames[kLeaseEnds] = {"released", "expired", "evicted", "replaced",
                                                    "device_lost"};
  return kNames[static_cast<int>(how)];
}

Metrics::Metrics()
    : registry_(std::make_shared<prometheus::Registry>()),
      sampled_(std::make_shared<SampledMetrics>()),
      callers_(*registry_) {
  MakeRequestSeries();
  MakeQueueSeries();
  MakeMemorySeries();
  MakeLeaseSeries();
  MakeStateSeries();
  AddProcessMetrics(*sampled_);
}

prometheus::Family<prometheus::Counter>& Metrics::CounterFamily(const char* name) {
  return prometheus::BuildCounter().Name(name).Help(HelpOf(name)).Register(*registry_);
}
prometheus::Family<prometheus::Gauge>& Metrics::GaugeFamily(const char* name) {
  return prometheus::BuildGauge().Name(name).Help(HelpOf(name)).Register(*registry_);
}
prometheus::Family<prometheus::Histogram>& Metrics::HistogramFamily(const char* name) {
  return prometheus::BuildHistogram().Name(name).Help(HelpOf(name)).Register(*registry_);
}

void Metrics::MakeRequestSeries() {
  requests_ = &CounterFamily("attnd_requests_total");
  durations_ = &HistogramFamily("attnd_request_duration_seconds");
  auto& stages = HistogramFamily("attnd_request_stage_duration_seconds");
  auto& refusals = HistogramFamily("attnd_refusal_duration_seconds");
  auto& in_flight = GaugeFamily("attnd_requests_in_flight");
  auto& tokens = HistogramFamily("attnd_request_tokens");
  for (int m = 0; m < kMethods; ++m) {
    std::string method = Name(MethodName(static_cast<Method>(m)));
    in_flight_.push_back(&in_flight.Add({{"method", method}}));
    if (!IsAttention(static_cast<Method>(m))) continue;
    for (const char* code : kCodes) requests_->Add({{"method", method}, {"code", code}});
    answered_.push_back(&requests_->Add({{"method", method}, {"code", "OK"}}));
    took_.push_back(&durations_->Add({{"method", method}}, RequestBuckets()));
    refusals_.push_back(&refusals.Add({{"method", method}}, StageBuckets()));
    for (const char* stage : kStageNames) {
      stages_.push_back(&stages.Add({{"method", method}, {"stage", stage}}, StageBuckets()));
    }
    tokens_.push_back(&tokens.Add({{"method", method}}, PowersOfFour(256, 1 << 20)));
  }
  auto& rejected = CounterFamily("attnd_rejected_requests_total");
  for (const auto& [reason, label] : kRejectLabels) {
    rejected_[Name(reason)] = &rejected.Add({{"reason", label}});
  }
  rejected_["invalid"] = &rejected.Add({{"reason", "invalid"}});
}

void Metrics::MakeQueueSeries() {
  auto& cancelled = CounterFamily("attnd_cancelled_requests_total");
  auto& expired = CounterFamily("attnd_expired_requests_total");
  for (int n = 0; n < kWorkStages; ++n) {
    std::string stage = Name(WorkStageName(static_cast<WorkStage>(n)));
    cancelled_.push_back(&cancelled.Add({{"stage", stage}}));
    expired_.push_back(&expired.Add({{"stage", stage}}));
  }
  cut_ = &CounterFamily("attnd_calls_cut_total");
  for (Method method : {Method::kForward, Method::kBackward}) {
    for (WorkStage stage : {WorkStage::kReceive, WorkStage::kSend}) {
      for (const auto& [reason, label] : kCutLabels) cut_->Add(CutLabels(method, stage, label));
    }
  }
  queue_duration_ = &HistogramFamily("attnd_queue_duration_seconds");
  auto& batch = HistogramFamily("attnd_batch_requests");
  auto& batch_tokens = HistogramFamily("attnd_batch_tokens");
  for (Direction direction : kDirections) {
    std::string name = Name(DirectionName(direction));
    batch_.push_back(&batch.Add({{"direction", name}}, PowersOfFour(1, 256)));
    batch_tokens_.push_back(&batch_tokens.Add({{"direction", name}}, PowersOfFour(256, 1 << 20)));
    queued_.push_back(
        &queue_duration_->Add(QueueLabels(direction, Priority::kNormal), QueueBuckets()));
  }
}

void Metrics::MakeMemorySeries() {
  auto& received = CounterFamily("attnd_received_bytes_total");
  auto& sent = CounterFamily("attnd_sent_bytes_total");
  for (const char* transport : {"tcp", "uds", "memfd"}) {
    received_.push_back(&received.Add({{"transport", transport}}));
    sent_.push_back(&sent.Add({{"transport", transport}}));
  }
  copied_ = &CounterFamily("attnd_host_copy_bytes_total").Add({{"site", "landing"}});
}

void Metrics::MakeLeaseSeries() {
  host_leases_ = MakeLeases("host");
  leases_refused_ = &CounterFamily("attnd_leases_refused_total").Add({});
  auto& lookups = CounterFamily("attnd_lease_lookups_total");
  for (const char* result : {"hit", "expired", "evicted", "released", "unknown", "wrong_replica",
                             "forbidden", "mismatch", "device_lost", "epoch_changed"}) {
    lease_lookups_.push_back(&lookups.Add({{"result", result}}));
  }
  upload_saved_ = &CounterFamily("attnd_upload_bytes_saved_total").Add({});
  lease_lifetime_ = &HistogramFamily("attnd_lease_lifetime_seconds").Add({}, LifetimeBuckets());
}

Metrics::Leases Metrics::MakeLeases(const std::string& place) {
  Leases leases;
  leases.granted = &CounterFamily("attnd_leases_granted_total").Add({{"device", place}});
  auto& ended = CounterFamily("attnd_leases_ended_total");
  for (int n = 0; n < kLeaseEnds; ++n) {
    const std::string reason = Name(LeaseEndName(static_cast<LeaseEnd>(n)));
    leases.ended.push_back(&ended.Add({{"device", place}, {"reason", reason}}));
  }
  return leases;
}

Metrics::Leases& Metrics::LeasesAt(int place) {
  return place == kHostMemory ? host_leases_ : devices_[place].leases;
}

void Metrics::MakeStateSeries() {
  auto& auth = CounterFamily("attnd_auth_failures_total");
  for (absl::string_view reason : {reason::kTokenMissing, reason::kTokenInvalid}) {
    auth_failures_[Name(reason)] = &auth.Add(
        {{"reason", reason == reason::kTokenMissing ? "token_missing" : "token_invalid"}});
  }
  ready_ = &GaugeFamily("attnd_ready").Add({});
  draining_ = &GaugeFamily("attnd_draining").Add({});
}

absl::Status Metrics::ExportSpans(const std::string& endpoint, const std::string& version) {
  ASSIGN_OR_RETURN(spans_, SpanExport::Start(endpoint, version));
  sampled_->AddCounter("attnd_spans_exported_total", {},
                       [this] { return static_cast<double>(spans_->exported()); });
  sampled_->AddCounter("attnd_spans_dropped_total", {},
                       [this] { return static_cast<double>(spans_->dropped()); });
  return absl::OkStatus();
}

void Metrics::SetBuildInfo(absl::string_view version, absl::string_view revision,
                           absl::string_view cpu_target) {
  GaugeFamily("attnd_build_info")
      .Add({{"version", Name(version)},
            {"revision", Name(revision)},
            {"cpu_target", Name(cpu_target)}})
      .Set(1);
}

int Metrics::AddDevice(const std::string& name, const BackendInfo& engine) {
  Device& device = devices_.emplace_back();
  device.name = name;
  device.leases = MakeLeases(name);
  for (Direction direction : kDirections) {
    const prometheus::Labels labels = {{"device", name},
                                       {"direction", Name(DirectionName(direction))}};
    MakeQueues(labels, device);
    MakeKernels(labels, device);
  }
  device.up = &GaugeFamily("attnd_gpu_up").Add({{"device", name}});
  GaugeFamily("attnd_gpu_info")
      .Add({{"device", name},
            {"backend", engine.backend},
            {"name", engine.device},
            {"architecture", engine.architecture},
            {"uuid", engine.uuid}})
      .Set(1);
  return static_cast<int>(devices_.size()) - 1;
}

void Metrics::MakeQueues(prometheus::Labels labels, Device& device) {
  auto& depth = GaugeFamily("attnd_queue_depth");
  auto& bytes = GaugeFamily("attnd_queue_bytes");
  device.queue_bytes.push_back(&bytes.Add(labels));
  for (Priority priority : kPriorityList) {
    labels["priority"] = Name(PriorityName(priority));
    device.queue_depth.push_back(&depth.Add(labels));
  }
}

void Metrics::MakeKernels(prometheus::Labels labels, Device& device) {
  auto& flops = CounterFamily("attnd_kernel_flops_total");
  auto& failures = CounterFamily("attnd_kernel_failures_total");
  device.flops.push_back(&flops.Add(labels));
  device.failures.push_back(&failures.Add(labels));
}

void Metrics::SetDeviceUp(int device, bool up) { devices_[device].up->Set(up ? 1 : 0); }

void Metrics::CallStarted(Method method) { in_flight_[static_cast<int>(method)]->Increment(); }

void Metrics::CallFinished(Method method, absl::StatusCode code, absl::string_view reason,
                           absl::Duration duration) {
  int m = static_cast<int>(method);
  in_flight_[m]->Increment(-1);
  const bool usual = code == absl::StatusCode::kOk && IsAttention(method);
  const std::string name = usual ? "" : Name(MethodName(method));
  (usual ? *answered_[m]
         : requests_->Add({{"method", name}, {"code", absl::StatusCodeToString(code)}}))
      .Increment();
  (IsAttention(method) ? *took_[m] : durations_->Add({{"method", name}}, RequestBuckets()))
      .Observe(absl::ToDoubleSeconds(duration));
  if (code == absl::StatusCode::kOk) return;
  auto rejected = rejected_.find(reason);
  if (rejected != rejected_.end()) {
    rejected->second->Increment();
    if (m < static_cast<int>(refusals_.size())) {
      refusals_[m]->Observe(absl::ToDoubleSeconds(duration));
    }
  }
  if (code == absl::StatusCode::kInvalidArgument) rejected_.find("invalid")->second->Increment();
}

void Metrics::StageTook(Method method, RequestStage stage, absl::Duration duration) {
  int index = static_cast<int>(method) * kRequestStages + static_cast<int>(stage);
  stages_[index]->Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::CallAdmitted(const AttentionCall& call) {
  tokens_[static_cast<int>(call.direction())]->Observe(static_cast<double>(TokensOf(call)));
}

int64_t Metrics::TokensOf(const AttentionCall& call) {
  const Problem& p = call.problem();
  return IsPacked(p.layout) ? p.q_len : p.batch * p.q_len;
}

void Metrics::CallQueued(Direction direction, Priority priority, absl::Duration waited) {
  (priority == Priority::kNormal
       ? *queued_[static_cast<int>(direction)]
       : queue_duration_->Add(QueueLabels(direction, priority), QueueBuckets()))
      .Observe(absl::ToDoubleSeconds(waited));
}

void Metrics::CallStopped(WorkStage stage, bool expired) {
  (expired ? expired_ : cancelled_)[static_cast<int>(stage)]->Increment();
}

void Metrics::CallCut(Method method, WorkStage stage, absl::string_view reason) {
  for (const auto& [known, label] : kCutLabels) {
    if (known == reason) cut_->Add(CutLabels(method, stage, label)).Increment();
  }
}

void Metrics::QueueChanged(int device, Direction direction, Priority priority, int calls,
                           int64_t bytes) {
  Device& at = devices_[device];
  at.queue_depth[At(direction, priority)]->Increment(calls);
  at.queue_bytes[static_cast<int>(direction)]->Increment(static_cast<double>(bytes));
}

void Metrics::BatchRun(Direction direction, int calls, int64_t tokens) {
  batch_[static_cast<int>(direction)]->Observe(calls);
  batch_tokens_[static_cast<int>(direction)]->Observe(static_cast<double>(tokens));
}

void Metrics::HostCopied(int64_t bytes) { copied_->Increment(static_cast<double>(bytes)); }

void Metrics::Received(bool unix_socket, int64_t bytes) {
  received_[unix_socket]->Increment(static_cast<double>(bytes));
}

void Metrics::SharedReceived(int64_t bytes) {
  if (bytes > 0) received_[2]->Increment(static_cast<double>(bytes));
}
void Metrics::SharedSent(int64_t bytes) {
  if (bytes > 0) sent_[2]->Increment(static_cast<double>(bytes));
}
void Metrics::Sent(bool unix_socket, int64_t bytes) {
  sent_[unix_socket]->Increment(static_cast<double>(bytes));
}

void Metrics::AuthFailed(absl::string_view reason) {
  auto failure = auth_failures_.find(reason);
  if (failure != auth_failures_.end()) failure->second->Increment();
}

void Metrics::LeaseGranted(int place) { LeasesAt(place).granted->Increment(); }
void Metrics::LeaseRefused() { leases_refused_->Increment(); }

void Metrics::LeaseEnded(int place, LeaseEnd how, absl::Duration lifetime) {
  LeasesAt(place).ended[static_cast<int>(how)]->Increment();
  lease_lifetime_->Observe(absl::ToDoubleSeconds(lifetime));
}

void Metrics::LeaseLookedUp(LeaseLookup result) {
  lease_lookups_[static_cast<int>(result)]->Increment();
}

void Metrics::UploadSaved(int64_t bytes) { upload_saved_->Increment(static_cast<double>(bytes)); }

void Metrics::SetReady(bool ready) { ready_->Set(ready ? 1 : 0); }
void Metrics::SetDraining() { draining_->Set(1); }

int64_t Metrics::HeadDimLabel(int64_t head_dim) {
  for (int64_t label : {32, 64, 96, 128}) {
    if (head_dim <= label) return label;
  }
  return 256;
}

Metrics::Kernel Metrics::KernelOf(const KernelSeries& series) {
  absl::MutexLock lock(&kernel_mutex_);
  auto known = kernels_.find(series);
  if (known != kernels_.end()) return known->second;
  prometheus::Labels labels = {{"device", devices_[series.device].name},
                               {"direction", Name(DirectionName(series.direction))},
                               {"dtype", Name(ElementName(series.element))},
                               {"kernel", series.kernel}};
  Kernel& kernel = kernels_[series];
  kernel.duration = &HistogramFamily("attnd_kernel_duration_seconds").Add(labels, KernelBuckets());
  labels["head_dim"] = std::to_string(series.head_dim);
  kernel.launches = &CounterFamily("attnd_kernel_launches_total").Add(labels);
  return kernel;
}

void Metrics::KernelRan(const KernelSeries& series, double seconds, double flops) {
  const Kernel kernel = KernelOf(series);
  kernel.duration->Observe(seconds);
  kernel.launches->Increment();
  devices_[series.device].flops[static_cast<int>(series.direction)]->Increment(flops);
}

void Metrics::KernelFailed(int device, Direction direction, const absl::Status& status) {
  devices_[device].failures[static_cast<int>(direction)]->Increment();
  const std::string error = CudaErrorIn(status.message());
  if (error.empty()) return;
  CounterFamily("attnd_cuda_errors_total")
      .Add({{"device", devices_[device].name}, {"error", error}})
      .Increment();
}

}  // namespace attnd
