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

// Flags of which an option follows, once all have been read.
struct RawFlags {
  double caller_memory_mib = 0, caller_module_mib = 0;
  double lease_memory_mib = -1, mask_memory_mib = -1, module_memory_mib = -1;
  bool check_config = false;
  std::string log_format = "text", log_level = "info";
  std::string fusion = "bound";
  std::string devices = "all";
};

// Absurd values stay out of every range instead of overflowing.
int64_t BytesOfMib(double mib) {
  return static_cast<int64_t>(std::clamp(mib * double{1 << 20}, -9e18, 9e18));
}

// Flags in seconds and in MiB, of options that hold a duration or bytes.
void AddSeconds(CLI::App& app, const char* name, absl::Duration& value, const char* help) {
  app.add_option_function<double>(
         name, [&value](double seconds) { value = absl::Seconds(seconds); }, help)
      ->default_str(absl::StrCat(absl::ToDoubleSeconds(value)));
}
void AddMib(CLI::App& app, const char* name, int64_t& value, const char* help) {
  app.add_option_function<double>(
         name, [&value](double mib) { value = BytesOfMib(mib); }, help)
      ->default_str(absl::StrCat(static_cast<double>(value) / double{1 << 20}));
}

void AddAddresses(CLI::App& app, ServerOptions& o) {
  app.option_defaults()->group("Addresses");
  app.add_option("--listen", o.listen,
                 "host:port or unix:PATH, several separated by commas; port 0 picks a free one. "
                 "Set it to serve other hosts or unix sockets.")
      ->delimiter(',')
      ->take_all();
  app.add_option("--port_file", o.port_file,
                 "file that gets each TCP port, one a line, once attnd serves. For scripts that "
                 "let the system pick the port.");
  app.add_option("--metrics_listen", o.metrics_listen,
                 "host:port of the metrics and the status page, without TLS: keep it on an "
                 "internal network. Empty: no metrics.");
  app.add_option("--metrics_port_file", o.metrics_port_file,
                 "file that gets the metrics port. For scripts that let the system pick it.");
}

void AddEngine(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  app.option_defaults()->group("Engine");
  app.add_option("--backend", o.backend,
                 "auto, cpu, cuda or reference. auto: cuda on a GPU of sm_70 or later, else cpu. "
                 "Set cuda to make a start without GPU fail.");
  app.add_option("--cpu_threads", o.cpu_threads,
                 "threads of the CPU engine. 0: what affinity and cgroup allow. Lower it to share "
                 "the CPU with other programs.");
  app.add_option("--devices", raw.devices,
                 "GPUs to use: all, or ordinals as in 0,2, as CUDA_VISIBLE_DEVICES numbers them. "
                 "One daemon for each GPU isolates failures.");
  app.add_option("--hbm_fraction", o.hbm_fraction,
                 "share of each GPU's free memory that attnd reserves at the start. Lower it to "
                 "share a GPU with other programs.");
  app.add_option("--max_launch_ms", o.max_launch_ms,
                 "longest kernel in milliseconds, by estimate; longer calls are split. Lower it if "
                 "small calls wait behind large ones.");
  app.add_option("--fusion", raw.fusion,
                 "which ops of a layer share a GPU kernel (equal results): off, bound (estimated), "
                 "measured (within 3 s, when first registered). Set off to compare.")
      ->check(CLI::IsMember({"off", "bound", "measured"}));
  app.add_option(
      "--nccl_library", o.nccl_library,
      "libnccl.so.2 or a path: GPUs of several daemons add up replicas' gradients by NCCL. "
      "Empty: never. Set it where callers and network are trusted.");
  app.add_option("--kernel_cache", o.kernel_cache,
                 "folder for kernels that are compiled at run time, and for what --fusion measured "
                 "finds. Empty: ~/.cache/attnd. Set it in containers without a home directory.");
}

void AddSecurity(CLI::App& app, ServerOptions& o) {
  app.option_defaults()->group("Security");
  app.add_option("--tls_cert", o.tls.certificate,
                 "PEM certificate chain; enables TLS on every TCP address. Set it if other hosts "
                 "reach the port.");
  app.add_option("--tls_key", o.tls.key, "unencrypted PEM private key of --tls_cert.");
  app.add_option("--tls_client_ca", o.tls.client_ca,
                 "PEM authorities; callers must show a certificate that they signed, whose name is "
                 "then the caller's. Set it for mutual TLS.");
  app.add_option("--token_file", o.token_file,
                 "file of lines \"name token\", 16 printable ASCII characters at least. Set it to "
                 "tell callers apart by bearer token.");
  app.add_flag("--insecure", o.insecure,
               "allow other hosts without TLS or authentication; the log warns at each start. For "
               "trusted networks, or behind a proxy.");
}

void AddLimits(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  app.option_defaults()->group("Limits");
  AddMib(
      app, "--memory_limit_mib", o.admission.memory_bytes,
      "memory for tensors of admitted calls; beyond it MEMORY_PRESSURE. Raise it for large calls "
      "or many callers.");
  app.add_option(
      "--max_calls", o.admission.max_calls,
      "admitted calls that are not computed yet; beyond it QUEUE_FULL. Raise it for very many "
      "small calls.");
  app.add_option(
      "--max_queue_seconds", o.admission.max_queue_seconds,
      "estimated work ahead of a new call; beyond it QUEUE_FULL. Lower it if callers have other "
      "daemons to try.");
  app.add_option("--caller_max_calls", o.admission.caller_max_calls,
                 "how much of --max_calls one caller may use. Lower it on a shared daemon.");
  app.add_option(
      "--caller_memory_mib", raw.caller_memory_mib,
      "how much of --memory_limit_mib one caller may use. 0: all of it. Set it on a shared "
      "daemon.");
  AddSeconds(
      app, "--max_deadline_seconds", o.admission.max_deadline,
      "longest deadline of a call, and the deadline of a call without one. Raise it for calls that "
      "take minutes.");
}

void AddTransport(CLI::App& app, TransportOptions& t) {
  app.option_defaults()->group("Transport");
  AddMib(
      app, "--max_message_mib", t.max_message_bytes,
      "largest request and reply in one message. Raise it for clients that do not stream calls.");
  app.add_option(
      "--max_concurrent_streams", t.max_concurrent_streams,
      "calls of one connection at a time; the peer queues further ones. Raise it behind a proxy "
      "that bundles callers.");
  AddMib(app, "--receive_memory_mib", t.receive_memory_bytes,
         "memory for requests while they arrive (gRPC's resource quota). Lower it on small hosts.");
  AddSeconds(
      app, "--stream_idle_seconds", t.transfers.idle,
      "a call whose peer neither sends nor reads for this long is cut. Raise it on unreliable "
      "links.");
  app.add_option(
      "--max_connections", t.max_connections,
      "connections open at a time, TCP and unix together; further ones are closed at once. Raise "
      "it for large jobs.");
  AddSeconds(app, "--max_connection_age_seconds", t.max_connection_age,
             "connections are renewed after this while calls go on. Lower it to rebalance replicas "
             "sooner.");
  AddSeconds(
      app, "--max_connection_idle_seconds", t.max_connection_idle,
      "a connection without a call is closed after this. Set it below the time after which your "
      "firewall drops it.");
  AddSeconds(
      app, "--keepalive_seconds", t.keepalive_time,
      "a connection that is silent during a call is pinged after this. Lower it behind a firewall "
      "that forgets connections.");
  app.add_option(
      "--bdp_probe", t.bdp_probe,
      "on, off or auto: windows follow the link's bandwidth-delay product. auto: on if other hosts "
      "can connect. Set on for long links.");
}

void AddLeases(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  app.option_defaults()->group("Residual leases");
  app.add_option(
      "--lease_memory_mib", raw.lease_memory_mib,
      "how much of --memory_limit_mib residuals outside GPUs may use. 0: none, -1: half. Raise it "
      "for training on CPUs.");
  app.add_option(
      "--lease_hbm_fraction", o.lease_hbm_fraction,
      "share of the reserved GPU memory for residuals. 0: none. Lower it if calls are refused with "
      "HBM_PRESSURE.");
  AddSeconds(
      app, "--lease_ttl_seconds", o.leases.ttl,
      "lifetime of a residual after its forward and after each use, at most 3600. Raise it for "
      "training steps beyond two minutes.");
}

void AddSharedMemory(CLI::App& app, ServerOptions& o) {
  app.option_defaults()->group("Shared memory");
  app.add_flag("--shared_memory,!--no-shared_memory", o.shared_memory.enabled,
               "--no-shared_memory forbids callers of unix:PATH to pass tensors in shared memory, "
               "over the socket PATH.shm.");
  AddMib(app, "--shared_memory_limit_mib", o.shared_memory.max_bytes,
         "what all callers together may share; they allocate it, and a GPU pins it. Lower "
         "it on hosts with less memory.");
}

void AddMasks(CLI::App& app, RawFlags& raw) {
  app.option_defaults()->group("Masks");
  app.add_option("--mask_memory_mib", raw.mask_memory_mib,
                 "memory for mask descriptions, as much for compiled ones, and for captured maps. "
                 "-1: an eighth of --memory_limit_mib, at most 256.");
}

void AddModules(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  app.option_defaults()->group("Modules");
  app.add_option(
      "--module_memory_mib", raw.module_memory_mib,
      "memory for modules. 0: none, -1: as --memory_limit_mib, on GPUs --module_hbm_fraction. "
      "Copies there take as much of the host's.");
  app.add_option("--module_hbm_fraction", o.modules.hbm_fraction,
                 "share for modules of the GPU memory for launches (88 % of the reserved), if "
                 "--module_memory_mib is -1. Raise it if only modules run.");
  app.add_option(
      "--caller_module_mib", raw.caller_module_mib,
      "how much of --module_memory_mib one caller may use. 0: all of it. Set it on a shared "
      "daemon.");
  app.add_option("--max_modules", o.modules.max_modules,
                 "modules of all callers together. Raise it for many small ones.");
  app.add_option("--module_state_dir", o.modules.state_dir,
                 "private folder (mode 0700), on a tmpfs or a disk, for modules whose callers ask "
                 "for durability. It holds everything twice. Empty: none.");
  AddMib(app, "--module_state_mib", o.modules.state_bytes,
         "most that states may take there, half of it for one caller. 0: eight times "
         "--module_memory_mib. Set it on shared disks.");
  app.add_option_function<double>(
         "--module_state_days", [&o](double days) { o.modules.state_age = absl::Hours(24) * days; },
         "a state is deleted once its module was not registered for so long. Lower it on small "
         "disks.")
      ->default_str(absl::StrCat(absl::ToDoubleHours(o.modules.state_age) / 24));
  app.add_option(
      "--module_shadow_every", o.modules.shadow_every,
      "steps between copies to a tmpfs. 0: as often as copies take a fifth of the time.");
  AddSeconds(app, "--module_save_seconds", o.modules.save_every,
             "seconds between saves to a disk. Lower it to lose less in a crash.");
}

void AddOperation(CLI::App& app, ServerOptions& o, RawFlags& raw) {
  app.option_defaults()->group("Operation");
  AddSeconds(app, "--drain_delay", o.drain_delay,
             "seconds of NOT_SERVING while new calls are accepted; skipped if all GPUs are "
             "lost. Raise it for slow balancers.");
  AddSeconds(app, "--drain_timeout", o.drain_timeout,
             "seconds for running calls to finish. The service manager's stop timeout must be "
             "longer. Raise it for long calls.");
  app.add_flag("--lend", o.lend.enabled,
               "serve only while nobody else uses the GPUs, as NVML tells, and give them back when "
               "another process appears. For hosts with owners.");
  AddSeconds(app, "--lend_after_seconds", o.lend.after,
             "idleness of the GPUs before --lend takes them. Raise it where owners pause.");
  AddSeconds(app, "--lend_within_seconds", o.lend.within,
             "time in which --lend gives the GPUs' memory back; what still runs then is cut. "
             "Raise it if owners can wait.");
  app.add_flag("--stop_at_eof", o.stop_at_eof,
               "drain when standard input ends. For programs that start attnd as a child and keep "
               "the other end of a pipe: it stops with them.");
  app.add_option("--log_format", raw.log_format, "text or json. Set json for a log collector.")
      ->check(CLI::IsMember({"text", "json"}));
  app.add_option("--log_level", raw.log_level,
                 "debug, info, warning or error. debug logs every call.")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  AddSeconds(app, "--slow_call_seconds", o.slow_call,
             "a call of attention that took longer is logged.");
  app.add_option("--otlp_endpoint", o.otlp_endpoint,
                 "http://host:port of a collector that gets spans of calls whose callers sample "
                 "them (OTLP over HTTP). Empty: none.");
  app.add_flag("--check_config", raw.check_config,
               "check the options and what they name, report what is wrong, and exit.")
      ->configurable(false);
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

void Apply(const RawFlags& raw, ServerOptions& o) {
  o.admission.caller_max_bytes =
      raw.caller_memory_mib == 0 ? o.admission.memory_bytes : BytesOfMib(raw.caller_memory_mib);
  o.leases.memory_bytes =
      raw.lease_memory_mib == -1 ? o.admission.memory_bytes / 2 : BytesOfMib(raw.lease_memory_mib);
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
  o.transport.max_connection_age_grace = 2 * o.admission.max_deadline;
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
  RawFlags raw;
  CLI::App app(kDescription, "attnd");
  app.set_version_flag("--version", "attnd " + std::string(version));
  app.set_config("--config", "", "file of flags, one \"flag = value\" a line");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.option_defaults()->always_capture_default();
  AddAddresses(app, o);
  AddEngine(app, o, raw);
  AddSecurity(app, o);
  AddLimits(app, o, raw);
  AddTransport(app, o.transport);
  AddLeases(app, o, raw);
  AddSharedMemory(app, o);
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
