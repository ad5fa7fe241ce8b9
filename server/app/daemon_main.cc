#include "server/app/daemon_main.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
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
#include "server/app/lender.h"
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
  absl::Time end = SteadyNow() + time;
  for (absl::Duration left = time; left > absl::ZeroDuration(); left = end - SteadyNow()) {
    timespec wait = absl::ToTimespec(left);
    if (sigtimedwait(&signals, nullptr, &wait) > 0) return false;
  }
  return true;
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
    if (SteadyNow() < next_) return;
    next_ = SteadyNow() + period_;
    Notify("WATCHDOG=1", log_);
  }

 private:
  const AttndServer& server_;
  Logger& log_;
  const absl::Duration period_ = WatchdogPeriod() / 3;
  absl::Time next_ = SteadyNow() + period_;
  bool stuck_ = false;
};

enum class Input { kQuiet, kSaid, kEnded };

// From whoever keeps the other end of standard input.
Input LookAtInput() {
  char said[4096];
  pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  if (poll(&input, 1, 0) <= 0) return Input::kQuiet;
  const ssize_t bytes = read(STDIN_FILENO, said, sizeof(said));
  return bytes == 0 ? Input::kEnded : bytes > 0 ? Input::kSaid : Input::kQuiet;
}

constexpr absl::string_view kEndOfInput = "end_of_input";

// Why to stop, or nothing. A lender says that a signal has come to it, and ends the input to have
// its GPUs back; what others say is ignored.
absl::string_view CauseToStop(const ServerOptions& options, const AttndServer& server) {
  if (!QuietFor(kLostPoll)) return "signal";
  if (server.device_lost()) return "device_lost";
  const Input input = options.stop_at_eof ? LookAtInput() : Input::kQuiet;
  if (input == Input::kEnded) return kEndOfInput;
  return input == Input::kSaid && options.lend.lent.has_value() ? "signal" : "";
}

// Until a signal to stop, or until a device is lost: then the others finish what they have. Nobody
// waits for balancers who has gone.
void ServeUntilStopped(const ServerOptions& options, AttndServer& server, Logger& log) {
  Watchdog watchdog(server, log);
  absl::string_view cause;
  while ((cause = CauseToStop(options, server)).empty()) watchdog.Look();
  const bool at_once = server.all_devices_lost() || cause == kEndOfInput;
  const absl::Duration delay = at_once ? absl::ZeroDuration() : options.drain_delay;
  const bool given_back = options.lend.lent.has_value() && cause == kEndOfInput;
  const absl::Duration timeout = given_back ? DrainOfLoan(options.lend) : options.drain_timeout;
  log.Info("draining", {{"cause", cause},
                        {"delay_seconds", absl::ToDoubleSeconds(delay)},
                        {"timeout_seconds", absl::ToDoubleSeconds(timeout)}});
  if (!options.lend.lent.has_value()) Notify("STOPPING=1", log);
  server.Drain(delay, timeout, QuietFor);
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
  if (!options.lend.lent.has_value()) Notify("READY=1", log);
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

// The process of --lend: its child serves.
int LendGpus(const ServerOptions& options, char** argv) {
  Logger log(stderr, options.log_format, options.log_level);
  auto lender = Lender::Start(options, argv, QuietFor, log);
  if (!lender.ok()) return Fail(log, lender.status());
  Notify("READY=1", log);
  absl::StatusOr<int> code = (*lender)->Run();
  if (code.ok()) return *code;
  log.Error("lending_failed", {{"message", code.status().message()}});
  return kExitFailed;
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
  flags->options.version = std::string(kVersion);
  flags->options.revision = std::string(Commit());
  if (flags->options.lend.enabled) {
    flags->options.lend.lent = LoansOfLender();
    if (!flags->options.lend.lent.has_value()) return LendGpus(flags->options, argv);
    flags->options.stop_at_eof = true;
  }
  TuneForTransport();
  return Serve(flags->options, make_devices);
}

}  // namespace attnd
