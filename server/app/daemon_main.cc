#include "server/app/daemon_main.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/service_notify.h"
#include "base/standard_streams.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "net/listen_address.h"
#include "net/process_tuning.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "server/app/attnd_server.h"
#include "server/app/flags.h"
#include "server/app/grpc_log.h"
#include "server/app/server_files.h"
#include "server/security/auth.h"

namespace attnd {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitBadOptions = 2;
constexpr int kExitWrongAnswer = 3;
constexpr int kExitDeviceLost = 4;
// Below, gRPC aborts or spins; a daemon that serves one caller has about 40.
constexpr rlim_t kFewestDescriptors = 64;
// How often a lost device is looked for.
constexpr absl::Duration kLostPoll = absl::Milliseconds(200);

void TuneProcess() {
  google::protobuf::SetLogHandler(nullptr);  // a caller's bad UTF-8 is answered, not logged
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);  // as much as "read your files again", which attnd does by itself
  rlimit no_core{0, 0};     // a core would hold callers' tensors
  setrlimit(RLIMIT_CORE, &no_core);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

absl::Status RequireDescriptors() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= kFewestDescriptors) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat("limit of open files: expected at least ",
                                                   kFewestDescriptors, ", got ", files.rlim_cur,
                                                   "; raise it (ulimit -n, LimitNOFILE=)"));
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Waits for SIGTERM or SIGINT; true when `time` passed without one.
bool QuietFor(absl::Duration time) {
  sigset_t signals = StopSignals();
  absl::Time end = absl::Now() + time;
  for (absl::Duration left = time; left > absl::ZeroDuration(); left = end - absl::Now()) {
    timespec wait = absl::ToTimespec(left);
    if (sigtimedwait(&signals, nullptr, &wait) > 0) return false;
  }
  return true;
}

// A link, a pipe, a device (/dev/stdout): written to where it is, and neither removed nor replaced.
bool StaysInPlace(const std::string& path) {
  struct stat what;
  return lstat(path.c_str(), &what) == 0 && !S_ISREG(what.st_mode);
}

// Readers of a plain file see either none or all of it.
absl::Status WritePorts(const std::string& path, const std::string& text) {
  const bool in_place = StaysInPlace(path);
  const std::string written = in_place ? path : absl::StrCat(path, ".tmp");
  std::ofstream file(written);
  file << text;
  file.close();
  if (file.fail() || (!in_place && std::rename(written.c_str(), path.c_str()) != 0)) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

// Removes the files of an earlier start: a reader that waits for the file must not see an old port.
void RemovePortFiles(const ServerOptions& options) {
  for (const std::string& path : {options.port_file, options.metrics_port_file}) {
    if (!path.empty() && !StaysInPlace(path)) std::remove(path.c_str());
  }
}

absl::Status WritePortFiles(const ServerOptions& options, const AttndServer& server) {
  std::string ports;
  for (const std::string& address : server.addresses()) {
    if (IsUnixAddress(address)) continue;
    absl::StrAppend(&ports, address.substr(address.rfind(':') + 1), "\n");
  }
  if (!options.port_file.empty()) RETURN_IF_ERROR(WritePorts(options.port_file, ports));
  if (options.metrics_port_file.empty()) return absl::OkStatus();
  return WritePorts(options.metrics_port_file, absl::StrCat(server.metrics_port(), "\n"));
}

void Notify(const char* state, Logger& log) {
  absl::Status status = NotifyServiceManager(state);
  if (!status.ok()) log.Warning("notify_failed", {{"message", status.message()}});
}

// Tells the service manager's watchdog that the server works, three times in its period. What is
// stuck is logged once, and the service manager restarts the process.
class Watchdog {
 public:
  Watchdog(const AttndServer& server, Logger& log) : server_(server), log_(log) {}

  void Look() {
    const absl::Status alive = server_.CheckAlive();
    if (!alive.ok()) {
      if (!std::exchange(stuck_, true)) {
        log_.Error("stuck", {{"message", alive.message()},
                             {"cure", "a restart, by the service manager's watchdog or by hand"}});
      }
      return;
    }
    stuck_ = false;
    if (absl::Now() < next_) return;
    next_ = absl::Now() + period_;
    Notify("WATCHDOG=1", log_);
  }

 private:
  const AttndServer& server_;
  Logger& log_;
  const absl::Duration period_ = WatchdogPeriod() / 3;
  absl::Time next_ = absl::Now() + period_;
  bool stuck_ = false;
};

// Until a signal to stop, or until a device is lost: then the others finish what they have.
void ServeUntilStopped(const ServerOptions& options, AttndServer& server, Logger& log) {
  Watchdog watchdog(server, log);
  while (QuietFor(kLostPoll) && !server.device_lost()) watchdog.Look();
  const absl::Duration delay =
      server.all_devices_lost() ? absl::ZeroDuration() : options.drain_delay;
  log.Info("draining", {{"cause", server.device_lost() ? "device_lost" : "signal"},
                        {"delay_seconds", absl::ToDoubleSeconds(delay)},
                        {"timeout_seconds", absl::ToDoubleSeconds(options.drain_timeout)}});
  Notify("STOPPING=1", log);
  server.Drain(delay, options.drain_timeout, QuietFor);
  log.Info("stopped");
}

void WarnWhenInsecure(const ServerOptions& options, Logger& log) {
  if (!options.insecure) return;
  for (const std::string& address : options.listen) {
    if (IsLoopbackAddress(address)) continue;
    log.Warning("insecure", {{"listen", address},
                             {"tls", !options.tls.certificate.empty()},
                             {"client_certificates", !options.tls.client_ca.empty()},
                             {"tokens", !options.token_file.empty()},
                             {"cure", "--tls_cert with --tls_client_ca, or a private network"}});
  }
}

int Fail(Logger& log, const absl::Status& status) {
  log.Error("start_failed",
            {{"code", absl::StatusCodeToString(status.code())}, {"message", status.message()}});
  return absl::StartsWith(status.message(), "self test") ? kExitWrongAnswer : kExitFailed;
}

void PrepareGrpc() {
  // To the process's end. Its shutdown would keep a daemon that has stopped for up to ten seconds:
  // it joins a thread that waits so long for sockets once a reply has not fitted a socket's buffer.
  grpc_init();
  // gRPC's own health service has no descriptor, and grpcurl calls only what it can look up.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
}

int Serve(const ServerOptions& options, const DeviceFactory& make_devices) {
  Logger log(stderr, options.log_format, options.log_level);
  absl::Status descriptors = RequireDescriptors();
  if (!descriptors.ok()) return Fail(log, descriptors);
  GrpcLog grpc_log(log);
  PrepareGrpc();
  RealClock clock;
  WarnWhenInsecure(options, log);
  RemovePortFiles(options);
  std::string note;
  auto devices = make_devices(options, &note);
  if (!devices.ok()) return Fail(log, devices.status());
  if (!note.empty()) log.Info("engine_choice", {{"message", note}});
  const BackendInfo info = devices->front().attention->info();
  const size_t count = devices->size();
  auto server = AttndServer::Start(options, *std::move(devices), clock, log);
  if (!server.ok()) return Fail(log, server.status());
  absl::Status written = WritePortFiles(options, **server);
  if (!written.ok()) return Fail(log, written);
  log.Info("serving", {{"version", VersionString()},
                       {"listen", absl::StrJoin((*server)->addresses(), ",")},
                       {"metrics_port", (*server)->metrics_port()},
                       {"backend", info.backend},
                       {"device", info.device},
                       {"devices", count},
                       {"architecture", info.architecture},
                       {"threads", info.threads},
                       {"memory_bytes", options.admission.memory_bytes}});
  Notify("READY=1", log);
  ServeUntilStopped(options, **server, log);
  return (*server)->device_lost() ? kExitDeviceLost : 0;
}

// Checks that the output has arrived, on a full disk too.
int AfterOutput() {
  if (std::cout.flush()) return 0;
  std::fprintf(stderr, "attnd: cannot write to standard output\n");
  return kExitFailed;
}

int CheckConfig(const ServerOptions& options) {
  absl::Status files = CheckFiles(options);
  if (!files.ok()) {
    std::fprintf(stderr, "attnd: %s\n", std::string(files.message()).c_str());
    return kExitFailed;
  }
  const std::string exposure = TokenFileExposure(options.token_file);
  if (!exposure.empty()) std::fprintf(stderr, "attnd: warning: %s\n", exposure.c_str());
  std::cout << "attnd: options are valid\n";
  return AfterOutput();
}

bool AsksForCheck(int argc, char** argv) {
  for (int n = 1; n < argc; ++n) {
    if (absl::string_view(argv[n]) == "--check_config") return true;
  }
  return false;
}

}  // namespace

int DaemonMain(int argc, char** argv, const DeviceFactory& make_devices) {
  OccupyStandardStreams();
  TuneProcess();
  // Before any thread starts, so that only DrainOnSignal ever sees them.
  sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  absl::StatusOr<Flags> flags = ParseFlags(argc, argv, VersionString(), std::cout);
  if (!flags.ok()) {
    std::fprintf(stderr, "attnd: %s\n", std::string(flags.status().message()).c_str());
    return AsksForCheck(argc, argv) ? kExitFailed : kExitBadOptions;
  }
  if (flags->action == FlagAction::kPrinted) return AfterOutput();
  if (flags->action == FlagAction::kCheckConfig) return CheckConfig(flags->options);
  TuneForTransport();
  flags->options.version = std::string(kVersion);
  flags->options.revision = std::string(Commit());
  return Serve(flags->options, make_devices);
}

}  // namespace attnd
