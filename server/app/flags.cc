#include "server/app/flags.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/flag_words.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr char kDescription[] =
    "attnd computes exact multi-head attention, forward and backward, for remote callers over "
    "gRPC.\n"
    "Exit codes: 0 drained or printed, 1 failed while starting or --check_config found a fault,\n"
    "2 bad options, 3 the engine gave a wrong answer, 4 a device was lost. SIGTERM drains; a "
    "second one stops at once.";

// Numbers in the flags' units; the options hold bytes and durations.
struct RawFlags {
  double memory_mib, caller_memory_mib = 0, max_message_mib, receive_memory_mib;
  double max_deadline_s, drain_delay_s, drain_timeout_s, slow_call_s;
  double connection_age_s, connection_idle_s, keepalive_s, stream_idle_s;
  double lease_memory_mib = -1, lease_ttl_s;
  double shared_memory_mib;
  double mask_memory_mib = -1;
  double module_memory_mib = -1, caller_module_mib = 0, module_save_s;
  double module_state_mib = 0, module_state_days;
  double lend_after_s, lend_within_s;
  bool check_config = false;
  std::string log_format = "text", log_level = "info";
  std::string fusion = "bound";
  std::string devices = "all";
};

double Mib(int64_t bytes) { return static_cast<double>(bytes) / double{1 << 20}; }
// Absurd values stay out of every range instead of overflowing.
int64_t BytesOfMib(double mib) {
  return static_cast<int64_t>(std::clamp(mib * double{1 << 20}, -9e18, 9e18));
}

RawFlags DefaultsOf(const ServerOptions& o) {
  auto seconds = [](absl::Duration d) { return absl::ToDoubleSeconds(d); };
  RawFlags raw;
  raw.memory_mib = Mib(o.admission.memory_bytes);
  raw.max_deadline_s = seconds(o.admission.max_deadline);
  raw.drain_delay_s = seconds(o.drain_delay);
  raw.drain_timeout_s = seconds(o.drain_timeout);
  raw.slow_call_s = seconds(o.slow_call);
  raw.lend_after_s = seconds(o.lend.after);
  raw.lend_within_s = seconds(o.lend.within);
  raw.module_save_s = seconds(o.modules.save_every);
  raw.module_state_days = seconds(o.modules.state_age) / (24 * 3600);
  raw.shared_memory_mib = Mib(o.shared_memory.max_bytes);
  raw.lease_ttl_s = seconds(o.leases.ttl);
  raw.max_message_mib = Mib(o.transport.max_message_bytes);
  raw.receive_memory_mib = Mib(o.transport.receive_memory_bytes);
  raw.connection_age_s = seconds(o.transport.max_connection_age);
  raw.connection_idle_s = seconds(o.transport.max_connection_idle);
  raw.keepalive_s = seconds(o.transport.keepalive_time);
  raw.stream_idle_s = seconds(o.transport.transfers.idle);
  return raw;
}

void AddAddresses(CLI::App& app, ServerOptions& o) {
  const char* group = "Addresses";
  app.add_option("--listen", o.listen,
                 "host:port or unix:PATH, several separated by commas; port 0 picks a free one. "
                 "Set it to serve other hosts or unix sockets.")
      ->delimiter(',')
      ->take_all()
      ->capture_default_str()
      ->group(group);
  app.add_option("--port_file", o.port_file,
                 "file that gets each TCP port, one a line, once attnd serves. For scripts that "
                 "let the system pick the port.")
      ->group(group);
  app.add_option("--metrics_listen", o.metrics_listen,
                 "host:port of the metrics and the status page, without TLS: keep it on an "
                 "internal network. Empty: no metrics.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--metrics_port_file", o.metrics_port_file,
                 "file that gets the metrics port. For scripts that let the system pick it.")
      ->group(group);
}

void AddEngine(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Engine";
  app.add_option("--backend", o.backend,
                 "auto, cpu, cuda or reference. auto: cuda on a GPU of sm_70 or later, else cpu. "
                 "Set cuda to make a start without GPU fail.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--cpu_threads", o.cpu_threads,
                 "threads of the CPU engine. 0: what affinity and cgroup allow. Lower it to share "
                 "the CPU with other programs.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--devices", raw.devices,
                 "GPUs to use: all, or ordinals as in 0,2, as CUDA_VISIBLE_DEVICES numbers them. "
                 "One daemon for each GPU isolates failures.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--hbm_fraction", o.hbm_fraction,
                 "share of each GPU's free memory that attnd reserves at the start. Lower it to "
                 "share a GPU with other programs.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--max_launch_ms", o.max_launch_ms,
                 "longest kernel in milliseconds, by estimate; longer calls are split. Lower it if "
                 "small calls wait behind large ones.")
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "--fusion", raw.fusion,
         "which ops of a layer share a GPU kernel (equal results): off, bound (estimated), "
         "measured (within 3 s, when first registered). Set off to compare.")
      ->capture_default_str()
      ->check(CLI::IsMember({"off", "bound", "measured"}))
      ->group(group);
  app.add_option(
         "--nccl_library", o.nccl_library,
         "libnccl.so.2 or a path: GPUs of several daemons add up replicas' gradients by NCCL. "
         "Empty: never. Set it where callers and network are trusted.")
      ->group(group);
  app.add_option("--kernel_cache", o.kernel_cache,
                 "folder for kernels that are compiled at run time, and for what --fusion measured "
                 "finds. Empty: ~/.cache/attnd. Set it in containers without a home directory.")
      ->group(group);
}

void AddSecurity(CLI::App& app, ServerOptions& o) {
  const char* group = "Security";
  app.add_option("--tls_cert", o.tls.certificate,
                 "PEM certificate chain; enables TLS on every TCP address. Set it if other hosts "
                 "reach the port.")
      ->group(group);
  app.add_option("--tls_key", o.tls.key, "unencrypted PEM private key of --tls_cert.")
      ->group(group);
  app.add_option("--tls_client_ca", o.tls.client_ca,
                 "PEM authorities; callers must show a certificate that they signed, whose name is "
                 "then the caller's. Set it for mutual TLS.")
      ->group(group);
  app.add_option("--token_file", o.token_file,
                 "file of lines \"name token\", 16 printable ASCII characters at least. Set it to "
                 "tell callers apart by bearer token.")
      ->group(group);
  app.add_flag("--insecure", o.insecure,
               "allow other hosts without TLS or authentication; the log warns at each start. For "
               "trusted networks, or behind a proxy.")
      ->group(group);
}

void AddLimits(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Limits";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--memory_limit_mib", raw.memory_mib,
      "memory for tensors of admitted calls; beyond it MEMORY_PRESSURE. Raise it for large calls "
      "or many callers.");
  add("--max_calls", o.admission.max_calls,
      "admitted calls that are not computed yet; beyond it QUEUE_FULL. Raise it for very many "
      "small calls.");
  add("--max_queue_seconds", o.admission.max_queue_seconds,
      "estimated work ahead of a new call; beyond it QUEUE_FULL. Lower it if callers have other "
      "daemons to try.");
  add("--caller_max_calls", o.admission.caller_max_calls,
      "how much of --max_calls one caller may use. Lower it on a shared daemon.");
  add("--caller_memory_mib", raw.caller_memory_mib,
      "how much of --memory_limit_mib one caller may use. 0: all of it. Set it on a shared "
      "daemon.");
  add("--max_deadline_seconds", raw.max_deadline_s,
      "longest deadline of a call, and the deadline of a call without one. Raise it for calls that "
      "take minutes.");
}

void AddTransport(CLI::App& app, TransportOptions& t, RawFlags& raw) {
  const char* group = "Transport";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--max_message_mib", raw.max_message_mib,
      "largest request and reply in one message. Raise it for clients that do not stream calls.");
  add("--max_concurrent_streams", t.max_concurrent_streams,
      "calls of one connection at a time; the peer queues further ones. Raise it behind a proxy "
      "that bundles callers.");
  add("--receive_memory_mib", raw.receive_memory_mib,
      "memory for requests while they arrive (gRPC's resource quota). Lower it on small hosts.");
  add("--stream_idle_seconds", raw.stream_idle_s,
      "a call whose peer neither sends nor reads for this long is cut. Raise it on unreliable "
      "links.");
  add("--max_connections", t.max_connections,
      "connections open at a time, TCP and unix together; further ones are closed at once. Raise "
      "it for large jobs.");
  add("--max_connection_age_seconds", raw.connection_age_s,
      "connections are renewed after this while calls go on. Lower it to rebalance replicas "
      "sooner.");
  add("--max_connection_idle_seconds", raw.connection_idle_s,
      "a connection without a call is closed after this. Set it below the time after which your "
      "firewall drops it.");
  add("--keepalive_seconds", raw.keepalive_s,
      "a connection that is silent during a call is pinged after this. Lower it behind a firewall "
      "that forgets connections.");
  add("--bdp_probe", t.bdp_probe,
      "on, off or auto: windows follow the link's bandwidth-delay product. auto: on if other hosts "
      "can connect. Set on for long links.");
}

void AddLeases(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Residual leases";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--lease_memory_mib", raw.lease_memory_mib,
      "how much of --memory_limit_mib residuals outside GPUs may use. 0: none, -1: half. Raise it "
      "for training on CPUs.");
  add("--lease_hbm_fraction", o.lease_hbm_fraction,
      "share of the reserved GPU memory for residuals. 0: none. Lower it if calls are refused with "
      "HBM_PRESSURE.");
  add("--lease_ttl_seconds", raw.lease_ttl_s,
      "lifetime of a residual after its forward and after each use, at most 3600. Raise it for "
      "training steps beyond two minutes.");
}

void AddSharedMemory(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Shared memory";
  app.add_flag("--shared_memory,!--no-shared_memory", o.shared_memory.enabled,
               "--no-shared_memory forbids callers of unix:PATH to pass tensors in shared memory, "
               "over the socket PATH.shm.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--shared_memory_limit_mib", raw.shared_memory_mib,
                 "what all callers together may share; they allocate it, and a GPU pins it. Lower "
                 "it on hosts with less memory.")
      ->capture_default_str()
      ->group(group);
}

void AddMasks(CLI::App& app, RawFlags& raw) {
  app.add_option("--mask_memory_mib", raw.mask_memory_mib,
                 "memory for mask descriptions, as much for compiled ones, and for captured maps. "
                 "-1: an eighth of --memory_limit_mib, at most 256.")
      ->capture_default_str()
      ->group("Masks");
}

void AddModules(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Modules";
  auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->group(group);
  };
  add("--module_memory_mib", raw.module_memory_mib,
      "memory for modules. 0: none, -1: as --memory_limit_mib, on GPUs --module_hbm_fraction. "
      "Copies there take as much of the host's.");
  add("--module_hbm_fraction", o.modules.hbm_fraction,
      "share for modules of the GPU memory for launches (88 % of the reserved), if "
      "--module_memory_mib is -1. Raise it if only modules run.");
  add("--caller_module_mib", raw.caller_module_mib,
      "how much of --module_memory_mib one caller may use. 0: all of it. Set it on a shared "
      "daemon.");
  add("--max_modules", o.modules.max_modules,
      "modules of all callers together. Raise it for many small ones.");
  app.add_option("--module_state_dir", o.modules.state_dir,
                 "private folder (mode 0700), on a tmpfs or a disk, for modules whose callers ask "
                 "for durability. It holds everything twice. Empty: none.")
      ->group(group);
  add("--module_state_mib", raw.module_state_mib,
      "most that states may take there, half of it for one caller. 0: eight times "
      "--module_memory_mib. Set it on shared disks.");
  add("--module_state_days", raw.module_state_days,
      "a state is deleted once its module was not registered for so long. Lower it on small "
      "disks.");
  add("--module_shadow_every", o.modules.shadow_every,
      "steps between copies to a tmpfs. 0: as often as copies take a fifth of the time.");
  add("--module_save_seconds", raw.module_save_s,
      "seconds between saves to a disk. Lower it to lose less in a crash.");
}

void AddOperation(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  const char* group = "Operation";
  app.add_option("--drain_delay", raw.drain_delay_s,
                 "seconds of NOT_SERVING while new calls are accepted; skipped if all GPUs are "
                 "lost. Raise it for slow balancers.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--drain_timeout", raw.drain_timeout_s,
                 "seconds for running calls to finish. The service manager's stop timeout must be "
                 "longer. Raise it for long calls.")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--lend", o.lend.enabled,
               "serve only while nobody else uses the GPUs, as NVML tells, and give them back when "
               "another process appears. For hosts with owners.")
      ->group(group);
  app.add_option("--lend_after_seconds", raw.lend_after_s,
                 "idleness of the GPUs before --lend takes them. Raise it where owners pause.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--lend_within_seconds", raw.lend_within_s,
                 "time in which --lend gives the GPUs' memory back; what still runs then is cut. "
                 "Raise it if owners can wait.")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--stop_at_eof", o.stop_at_eof,
               "drain when standard input ends. For programs that start attnd as a child and keep "
               "the other end of a pipe: it stops with them.")
      ->group(group);
  app.add_option("--log_format", raw.log_format, "text or json. Set json for a log collector.")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json"}))
      ->group(group);
  app.add_option("--log_level", raw.log_level,
                 "debug, info, warning or error. debug logs every call.")
      ->capture_default_str()
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->group(group);
  app.add_option("--slow_call_seconds", raw.slow_call_s,
                 "a call of attention that took longer is logged.")
      ->capture_default_str()
      ->group(group);
  app.add_option("--otlp_endpoint", o.otlp_endpoint,
                 "http://host:port of a collector that gets spans of calls whose callers sample "
                 "them (OTLP over HTTP). Empty: none.")
      ->group(group);
  app.add_flag("--check_config", raw.check_config,
               "check the options and what they name, report what is wrong, and exit.")
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

// "all" gives an empty list.
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
  t.receive_memory_bytes = BytesOfMib(raw.receive_memory_mib);
  t.max_connection_age = absl::Seconds(raw.connection_age_s);
  t.max_connection_idle = absl::Seconds(raw.connection_idle_s);
  t.keepalive_time = absl::Seconds(raw.keepalive_s);
  t.transfers.idle = absl::Seconds(raw.stream_idle_s);
}

void Apply(const RawFlags& raw, ServerOptions& o) {
  o.admission.memory_bytes = BytesOfMib(raw.memory_mib);
  o.admission.caller_max_bytes =
      raw.caller_memory_mib == 0 ? o.admission.memory_bytes : BytesOfMib(raw.caller_memory_mib);
  o.admission.max_deadline = absl::Seconds(raw.max_deadline_s);
  o.leases.memory_bytes =
      raw.lease_memory_mib == -1 ? o.admission.memory_bytes / 2 : BytesOfMib(raw.lease_memory_mib);
  o.leases.ttl = absl::Seconds(raw.lease_ttl_s);
  o.shared_memory.max_bytes = BytesOfMib(raw.shared_memory_mib);
  o.masks.bytes = raw.mask_memory_mib == -1 ? std::clamp(o.admission.memory_bytes / 8,
                                                         int64_t{1} << 20, int64_t{256} << 20)
                                            : BytesOfMib(raw.mask_memory_mib);
  o.masks.bytes_of_caller = o.masks.bytes / 4;
  o.captures.bytes = o.masks.bytes;
  o.captures.bytes_of_caller = o.captures.bytes / 2;
  o.mask_plans = std::make_shared<MaskPlans>(o.masks.bytes);
  o.shared_memory.user_max_bytes = o.shared_memory.max_bytes;
  o.modules.memory_is_share = raw.module_memory_mib == -1;
  o.modules.memory.bytes =
      raw.module_memory_mib == -1 ? o.admission.memory_bytes : BytesOfMib(raw.module_memory_mib);
  o.modules.memory.caller_bytes =
      raw.caller_module_mib == 0 ? o.modules.memory.bytes : BytesOfMib(raw.caller_module_mib);
  o.modules.save_every = absl::Seconds(raw.module_save_s);
  o.modules.state_bytes = BytesOfMib(raw.module_state_mib);
  o.modules.state_age = absl::Hours(24) * raw.module_state_days;
  ApplyTransport(raw, o.transport);
  o.transport.max_connection_age_grace = 2 * o.admission.max_deadline;
  o.drain_delay = absl::Seconds(raw.drain_delay_s);
  o.drain_timeout = absl::Seconds(raw.drain_timeout_s);
  o.slow_call = absl::Seconds(raw.slow_call_s);
  o.lend.after = absl::Seconds(raw.lend_after_s);
  o.lend.within = absl::Seconds(raw.lend_within_s);
  if (o.lend.enabled && o.backend == "auto") o.backend = "cuda";
  o.log_format = raw.log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  o.log_level = ParseSeverity(raw.log_level);
  o.fusion = raw.fusion == "off"        ? Fusion::kOff
             : raw.fusion == "measured" ? Fusion::kMeasured
                                        : Fusion::kBound;
}

// CLI11 alone reads an empty value, such as an unset variable in a script, as 0, and accepts "nan".
void RequireNumbers(CLI::App& app) {
  auto check = [](std::string& value) -> std::string {
    double number = 0;
    if (absl::SimpleAtod(value, &number) && !std::isnan(number)) return "";
    return absl::StrCat("expected a number, got \"", value, "\"");
  };
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type == "INT" || type == "FLOAT") option->check(CLI::Validator(check, ""));
  }
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
  AddMasks(app, raw);
  AddModules(app, o, raw);
  AddOperation(app, o, raw);
  RequireNumbers(app);
  try {  // CLI11 reports by throwing
    app.parse(FlagWords(argc, argv));
  } catch (const CLI::Success& done) {
    app.exit(done, out, out);
    flags.action = FlagAction::kPrinted;
    return flags;
  } catch (const CLI::ExtrasError& error) {
    return absl::InvalidArgumentError(absl::StrCat(error.what(), "; attnd --help lists the flags"));
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(error.what());
  }
  Apply(raw, o);
  ASSIGN_OR_RETURN(o.devices, ParseDevices(raw.devices));
  if (raw.check_config) flags.action = FlagAction::kCheckConfig;
  RETURN_IF_ERROR(CheckOptions(o));
  return flags;
}

}  // namespace attnd
