#include "server/flags.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/cpu_quota.h"
#include "base/flag_kinds.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr char kDescription[] =
    "attnd computes exact multi-head attention, forward and backward, for remote callers over "
    "gRPC.\n"
    "Exit codes: 0 drained or printed, 1 failed while starting or --check_config found a fault,\n"
    "2 bad options, 3 the engine gave a wrong answer, 4 a device was lost. SIGTERM drains; a "
    "second one stops at once.";

// Numbers as people write them; the options hold bytes and durations.
struct RawFlags {
  double memory_mib, caller_memory_mib, max_batch_mib, max_message_mib, receive_memory_mib;
  double inline_us = 200;
  double max_deadline_s, drain_delay_s, drain_timeout_s, slow_call_s;
  double connection_age_s, connection_idle_s, handshake_s, keepalive_s, keepalive_timeout_s;
  double min_ping_s, stream_idle_s;
  double metadata_kib, window_kib, frame_kib;
  int64_t stream_min_kib;
  double lease_memory_mib = -1, caller_lease_memory_mib = 0;
  double lease_ttl_s, lease_max_ttl_s, lease_min_hold_s;
  double shared_memory_mib, shared_memory_user_mib;
  bool check_config = false;
  std::string log_format = "text", log_level = "info";
  std::string devices = "all";
};

double Mib(int64_t bytes) { return static_cast<double>(bytes) / double{1 << 20}; }
// What no memory has stays out of every range.
int64_t Bytes(double count) { return static_cast<int64_t>(std::clamp(count, -9e18, 9e18)); }
int64_t BytesOfMib(double mib) { return Bytes(mib * double{1 << 20}); }
double Kib(int64_t bytes) { return static_cast<double>(bytes) / 1024; }
int64_t BytesOfKib(double kib) { return Bytes(kib * 1024); }

void SetTransportDefaults(const TransportOptions& t, RawFlags& raw) {
  auto seconds = [](absl::Duration d) { return absl::ToDoubleSeconds(d); };
  raw.max_message_mib = Mib(t.max_message_bytes);
  raw.metadata_kib = Kib(t.max_metadata_bytes);
  raw.receive_memory_mib = Mib(t.receive_memory_bytes);
  raw.connection_age_s = seconds(t.max_connection_age);
  raw.connection_idle_s = seconds(t.max_connection_idle);
  raw.handshake_s = seconds(t.handshake_timeout);
  raw.keepalive_s = seconds(t.keepalive_time);
  raw.keepalive_timeout_s = seconds(t.keepalive_timeout);
  raw.min_ping_s = seconds(t.min_ping_interval);
  raw.window_kib = Kib(t.stream_window_bytes);
  raw.frame_kib = Kib(t.max_frame_bytes);
  raw.stream_idle_s = seconds(t.streams.idle);
  raw.stream_min_kib = t.streams.min_bytes_per_second >> 10;
}

RawFlags DefaultsOf(const ServerOptions& o) {
  RawFlags raw;
  raw.memory_mib = Mib(o.admission.memory_bytes);
  raw.caller_memory_mib = 0;
  raw.max_batch_mib = Mib(o.worker.batcher.max_bytes);
  raw.max_deadline_s = absl::ToDoubleSeconds(o.admission.max_deadline);
  raw.drain_delay_s = absl::ToDoubleSeconds(o.drain_delay);
  raw.drain_timeout_s = absl::ToDoubleSeconds(o.drain_timeout);
  raw.slow_call_s = absl::ToDoubleSeconds(o.slow_call);
  raw.shared_memory_mib = Mib(o.shared_memory.max_bytes);
  raw.shared_memory_user_mib = 0;
  raw.lease_ttl_s = absl::ToDoubleSeconds(o.leases.ttl);
  raw.lease_max_ttl_s = absl::ToDoubleSeconds(o.leases.max_ttl);
  raw.lease_min_hold_s = absl::ToDoubleSeconds(o.leases.min_hold);
  SetTransportDefaults(o.transport, raw);
  return raw;
}

void AddAddresses(CLI::App& app, ServerOptions& o) {
  const char* group = "Addresses";
  app.add_option("--listen", o.listen,
                 "host:port, unix:PATH or a list of them; port 0 picks a free one")
      ->delimiter(',')
      ->take_all()
      ->capture_default_str()
      ->group(group);
  app.add_option("--port_file", o.port_file,
                 "written once serving: one line with the port of each TCP address")
      ->group(group);
  app.add_option("--metrics_listen", o.metrics_listen,
                 "host:port of Prometheus' /metrics; empty: none")
      ->capture_default_str()
      ->group(group);
  app.add_option("--metrics_port_file", o.metrics_port_file, "as --port_file, of /metrics")
      ->group(group);
}

void AddEngine(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Engine";
  app.add_option("--backend", o.backend,
                 "auto, cpu, cuda or reference; auto: cuda on a V100 (sm_70), cpu everywhere else")
      ->capture_default_str()
      ->group(group);
  app.add_option("--cpu_threads", o.cpu_threads, "threads of the cpu engine; 0: all it may use")
      ->capture_default_str()
      ->group(group);
  app.add_option("--devices", raw.devices, "GPUs of the cuda engine: all, or ordinals as in 0,2")
      ->capture_default_str()
      ->group(group);
  app.add_option("--hbm_fraction", o.hbm_fraction, "of each GPU's free memory, taken at the start")
      ->capture_default_str()
      ->group(group);
  app.add_option("--max_launch_ms", o.max_launch_ms,
                 "milliseconds that one kernel may keep a GPU; longer calls are cut")
      ->capture_default_str()
      ->group(group);
  app.add_option("--kernel_cache", o.kernel_cache,
                 "folder for kernels compiled at run time; empty: ~/.cache/attnd")
      ->group(group);
}

void AddSecurity(CLI::App& app, ServerOptions& o) {
  const char* group = "Security";
  app.add_option("--tls_cert,--tls_certificate", o.tls.certificate,
                 "PEM certificate chain; TLS on every TCP address; read again when it changes")
      ->group(group);
  app.add_option("--tls_key", o.tls.key, "PEM private key of --tls_cert")->group(group);
  app.add_option("--tls_client_ca", o.tls.client_ca,
                 "PEM: callers must show a certificate signed by it")
      ->group(group);
  app.add_option("--token_file", o.token_file,
                 "lines \"name token\"; callers must send one as a bearer token")
      ->group(group);
  app.add_flag("--insecure", o.insecure,
               "allow addresses that others reach without TLS or without authentication")
      ->group(group);
}

void AddLimits(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Limits";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--memory_limit_mib", raw.memory_mib, "memory for tensors in work; beyond: MEMORY_PRESSURE");
  add("--max_calls", o.admission.max_calls, "admitted calls not yet computed; beyond: QUEUE_FULL");
  add("--max_queue_seconds", o.admission.max_queue_seconds,
      "estimated work ahead of a new call; beyond: QUEUE_FULL");
  add("--caller_max_calls", o.admission.caller_max_calls, "of --max_calls, by one caller");
  add("--caller_memory_mib", raw.caller_memory_mib,
      "of --memory_limit_mib, by one caller; 0: all of it");
  add("--max_deadline_seconds", raw.max_deadline_s, "cap on a call's time; also when it sets none");
  add("--max_batch_calls", o.worker.batcher.max_calls, "calls in one launch");
  add("--max_batch_mib", raw.max_batch_mib, "memory of one launch of several calls");
  add("--max_batch_seconds", o.worker.batcher.max_seconds,
      "estimated time of one launch of several calls");
  add("--slots", o.worker.slots, "batches in work at once; 0: what the engine overlaps");
  add("--inline_us", raw.inline_us,
      "a call estimated to take no longer, while no other is in work, is computed by the thread "
      "that received it; 0: never");
}

void AddTransport(CLI::App& app, TransportOptions& t, RawFlags& raw) {
  const char* group = "Transport";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  auto add_switch = [&](const char* names, bool& value, const char* help) {
    app.add_flag(names, value, help)->capture_default_str()->group(group);
  };
  add("--max_message_mib", raw.max_message_mib, "largest request and reply");
  add("--max_metadata_kib", raw.metadata_kib, "headers of one call; beyond: RESOURCE_EXHAUSTED");
  add("--max_concurrent_streams", t.max_concurrent_streams, "calls of one connection");
  add("--receive_memory_mib", raw.receive_memory_mib, "memory of requests while they arrive");
  add("--stream_idle_seconds", raw.stream_idle_s,
      "a streamed call whose peer moves nothing for this long is cut");
  add("--stream_min_kib_per_second", raw.stream_min_kib,
      "a streamed call whose peer is slower on average is cut");
  add("--event_threads", t.event_threads,
      "most threads for connections that move much, 1 to 64; 0: by the number of cores");
  add("--max_connections", t.max_connections, "open at a time; a further one is closed at once");
  add("--max_wasted_frames_per_second", t.max_wasted_frames,
      "frames of a connection that ask for nothing; beyond: not read for a while; 0: any");
  add("--max_connection_age_seconds", raw.connection_age_s,
      "connections are renewed after this, to rebalance");
  add("--max_connection_idle_seconds", raw.connection_idle_s,
      "a connection without a call is closed after this");
  add("--handshake_timeout_seconds", raw.handshake_s,
      "TLS and HTTP/2 of a new connection take no longer, or it is closed");
  add("--keepalive_seconds", raw.keepalive_s,
      "a connection that is silent in a call is probed after this");
  add("--keepalive_timeout_seconds", raw.keepalive_timeout_s,
      "a probe that is not answered for this long ends its connection");
  add("--min_ping_interval_seconds", raw.min_ping_s,
      "a peer that probes more often in a call is disconnected");
  add("--stream_window_kib", raw.window_kib, "what a peer may send of one call before it is read");
  add("--max_frame_kib", raw.frame_kib, "HTTP/2 frames that a peer may send");
  add("--bdp_probe", t.bdp_probe,
      "let gRPC set the windows by probing for the bandwidth-delay product: on, off, or auto, "
      "which is on where other hosts may connect");
  add("--loopback_congestion", t.loopback_congestion,
      "TCP congestion control of connections within this host; empty: the system's");
  add_switch("--tune_malloc,!--no-tune_malloc", t.tune_malloc,
             "keep freed memory for the next message instead of returning it");
  add_switch("--deadlock_check,!--no-deadlock_check", t.deadlock_check,
             "abseil's deadlock detector on each lock, for debugging");
}

void AddLeases(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Residual leases";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--lease_memory_mib", raw.lease_memory_mib,
      "of --memory_limit_mib, for tensors kept between forward and backward that are not on a GPU; "
      "they give way to calls; 0: keep none, -1: half of it");
  add("--lease_hbm_fraction", o.lease_hbm_fraction,
      "of the memory that attnd holds of each GPU, for tensors kept there; they give way to calls");
  add("--caller_lease_memory_mib", raw.caller_lease_memory_mib,
      "kept for one caller, there and on GPUs together; 0: no limit of its own");
  add("--max_leases", o.leases.max_leases, "kept forward calls");
  add("--lease_ttl_seconds", raw.lease_ttl_s, "life of a lease, after the forward and each use");
  add("--lease_max_ttl_seconds", raw.lease_max_ttl_s, "the longest life that a caller may ask for");
  add("--lease_min_hold_seconds", raw.lease_min_hold_s,
      "a lease used within this time is not evicted for a new call");
}

void AddSharedMemory(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Shared memory";
  app.add_flag("--shared_memory,!--no-shared_memory", o.shared_memory.enabled,
               "callers of unix:PATH may share memory over PATH.shm")
      ->capture_default_str()
      ->group(group);
  app.add_option("--shared_memory_limit_mib", raw.shared_memory_mib, "that all callers share")
      ->capture_default_str()
      ->group(group);
  app.add_option("--shared_memory_user_mib", raw.shared_memory_user_mib,
                 "of --shared_memory_limit_mib, by one user id; 0: all of it")
      ->capture_default_str()
      ->group(group);
  app.add_option("--shared_memory_connections", o.shared_memory.max_connections,
                 "callers that share memory at a time")
      ->capture_default_str()
      ->group(group);
}

void AddOperation(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Operation";
  app.add_option("--drain_delay,--drain_delay_seconds", raw.drain_delay_s,
                 "seconds of NOT_SERVING while calls are still taken")
      ->capture_default_str()
      ->group(group);
  app.add_option("--drain_timeout,--drain_timeout_seconds", raw.drain_timeout_s,
                 "seconds for calls in flight to finish")
      ->capture_default_str()
      ->group(group);
  app.add_option("--log_format", raw.log_format, "text or json")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json"}))
      ->group(group);
  app.add_option("--log_level", raw.log_level, "debug, info, warning or error")
      ->capture_default_str()
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->group(group);
  app.add_option("--slow_call_seconds", raw.slow_call_s, "calls that take longer are logged")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--check_config", raw.check_config, "check the options, say what is wrong, and stop")
      ->configurable(false)
      ->group(group);
}

Severity ParseSeverity(const std::string& level) {
  static const std::map<std::string, Severity> severities = {{"debug", Severity::kDebug},
                                                             {"info", Severity::kInfo},
                                                             {"warning", Severity::kWarning},
                                                             {"error", Severity::kError}};
  return severities.at(level);
}

void ApplyLeases(const RawFlags& raw, ServerOptions& o) {
  o.leases.memory_bytes =
      raw.lease_memory_mib == -1 ? o.admission.memory_bytes / 2 : BytesOfMib(raw.lease_memory_mib);
  o.leases.caller_bytes = raw.caller_lease_memory_mib == 0
                              ? std::numeric_limits<int64_t>::max()
                              : BytesOfMib(raw.caller_lease_memory_mib);
  o.leases.ttl = absl::Seconds(raw.lease_ttl_s);
  o.leases.max_ttl = absl::Seconds(raw.lease_max_ttl_s);
  o.leases.min_hold = absl::Seconds(raw.lease_min_hold_s);
}

// "all" is no list.
absl::StatusOr<std::vector<int>> ParseDevices(const std::string& text) {
  std::vector<int> devices;
  if (text == "all") return devices;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int ordinal = 0;
    if (!absl::SimpleAtoi(part, &ordinal) || absl::c_linear_search(devices, ordinal)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--devices: expected all or different ordinals as in 0,2, got ", text));
    }
    devices.push_back(ordinal);
  }
  return devices;
}

void ApplyTransport(const RawFlags& raw, TransportOptions& t) {
  t.max_message_bytes = BytesOfMib(raw.max_message_mib);
  t.max_metadata_bytes = BytesOfKib(raw.metadata_kib);
  t.receive_memory_bytes = BytesOfMib(raw.receive_memory_mib);
  t.max_connection_age = absl::Seconds(raw.connection_age_s);
  t.max_connection_idle = absl::Seconds(raw.connection_idle_s);
  t.handshake_timeout = absl::Seconds(raw.handshake_s);
  t.keepalive_time = absl::Seconds(raw.keepalive_s);
  t.keepalive_timeout = absl::Seconds(raw.keepalive_timeout_s);
  t.min_ping_interval = absl::Seconds(raw.min_ping_s);
  t.stream_window_bytes = BytesOfKib(raw.window_kib);
  t.max_frame_bytes = BytesOfKib(raw.frame_kib);
  t.streams.idle = absl::Seconds(raw.stream_idle_s);
  t.streams.min_bytes_per_second = raw.stream_min_kib << 10;
}

void Apply(const RawFlags& raw, ServerOptions& o) {
  o.admission.memory_bytes = BytesOfMib(raw.memory_mib);
  o.admission.caller_max_bytes =
      raw.caller_memory_mib == 0 ? o.admission.memory_bytes : BytesOfMib(raw.caller_memory_mib);
  o.admission.max_deadline = absl::Seconds(raw.max_deadline_s);
  o.worker.batcher.max_bytes = BytesOfMib(raw.max_batch_mib);
  o.worker.inline_time = absl::Microseconds(raw.inline_us);
  o.shared_memory.max_bytes = BytesOfMib(raw.shared_memory_mib);
  o.shared_memory.user_max_bytes = raw.shared_memory_user_mib == 0
                                       ? o.shared_memory.max_bytes
                                       : BytesOfMib(raw.shared_memory_user_mib);
  ApplyTransport(raw, o.transport);
  o.transport.max_connection_age_grace = 2 * o.admission.max_deadline;
  o.drain_delay = absl::Seconds(raw.drain_delay_s);
  o.drain_timeout = absl::Seconds(raw.drain_timeout_s);
  o.slow_call = absl::Seconds(raw.slow_call_s);
  o.log_format = raw.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  o.log_level = ParseSeverity(raw.log_level);
  ApplyLeases(raw, o);
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv, absl::string_view version,
                                 std::ostream& out) {
  Flags flags;
  ServerOptions& o = flags.options;
  o.admission.memory_bytes = DefaultMemoryBytes();
  RawFlags raw = DefaultsOf(o);
  CLI::App app(kDescription, "attnd");
  app.set_version_flag("--version", "attnd " + std::string(version));
  app.set_config("--config", "", "file of flags, one \"flag = value\" a line");
  app.allow_config_extras(CLI::config_extras_mode::error);
  AddAddresses(app, o);
  AddEngine(app, o, raw);
  AddSecurity(app, o);
  AddLimits(app, o, raw);
  AddTransport(app, o.transport, raw);
  AddLeases(app, o, raw);
  AddSharedMemory(app, o, raw);
  AddOperation(app, o, raw);
  CheckFlagKinds(app);
  try {  // CLI11 reports by throwing
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {
    app.exit(done, out, out);
    flags.action = FlagAction::kPrinted;
    return flags;
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(FlagError(error));
  }
  Apply(raw, o);
  ASSIGN_OR_RETURN(o.devices, ParseDevices(raw.devices));
  if (raw.check_config) flags.action = FlagAction::kCheckConfig;
  RETURN_IF_ERROR(CheckOptions(o));
  return flags;
}

}  // namespace attnd
