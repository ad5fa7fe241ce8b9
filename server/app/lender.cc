#include "server/app/lender.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/service_notify.h"
#include "base/status_macros.h"
#include "server/app/metrics_port.h"
#include "server/app/server_files.h"
#include "server/metrics/metrics.h"

namespace attnd {
namespace {

constexpr char kVariable[] = "ATTND_LENT";  // "DRAINED,KILLED", to the child
constexpr absl::Duration kLook = absl::Milliseconds(100);
constexpr absl::Duration kLookForEnd = absl::Milliseconds(10);
// A child that starts does not tell the service manager's watchdog that it works.
constexpr absl::Duration kStart = absl::Seconds(60);
constexpr int kFailed = 1;

// The environment of the child. systemd's watchdog hears it as any process of the service.
std::vector<std::string> ChildEnvironment(const LendOptions::Loans& loans) {
  std::vector<std::string> variables = {
      absl::StrCat(kVariable, "=", loans.drained, ",", loans.killed)};
  if (std::getenv("CUDA_DEVICE_ORDER") == nullptr) {
    variables.push_back("CUDA_DEVICE_ORDER=PCI_BUS_ID");
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!absl::StartsWith(*variable, "WATCHDOG_PID=")) variables.push_back(*variable);
  }
  return variables;
}

absl::Status Failed(const char* call, int error) {
  return absl::InternalError(absl::StrCat("lend: ", call, ": ", std::strerror(error)));
}

// The exit code of a child that has ended.
std::optional<int> EndOf(pid_t process, int options) {
  int status = 0;
  if (waitpid(process, &status, options) != process) return std::nullopt;
  return WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
}

// The metrics port while nobody serves: not ready, and alive.
class WaitingPort {
 public:
  static absl::StatusOr<std::unique_ptr<WaitingPort>> Open(const ServerOptions& options,
                                                           const LendOptions::Loans& loans) {
    auto waiting = std::make_unique<WaitingPort>();
    if (options.metrics_listen.empty()) return waiting;
    waiting->metrics_.SetBuildInfo(options.version, options.revision, "");
    AddLendMetrics(loans, false, *waiting->metrics_.sampled());
    ASSIGN_OR_RETURN(waiting->port_, MetricsPort::Open(options.metrics_listen, waiting->metrics_,
                                                       {.ready = [] { return false; },
                                                        .alive = [] { return absl::OkStatus(); }}));
    if (options.metrics_port_file.empty()) return waiting;
    RETURN_IF_ERROR(
        WritePorts(options.metrics_port_file, absl::StrCat(waiting->port_->port(), "\n")));
    return waiting;
  }

 private:
  Metrics metrics_;
  std::unique_ptr<MetricsPort> port_;
};

}  // namespace

std::optional<LendOptions::Loans> LoansOfLender() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr) return std::nullopt;
  const std::pair<std::string, std::string> counts = absl::StrSplit(text, ',');
  LendOptions::Loans loans;
  (void)absl::SimpleAtoi(counts.first, &loans.drained);
  (void)absl::SimpleAtoi(counts.second, &loans.killed);
  return loans;
}

absl::Duration DrainOfLoan(const LendOptions& options) { return options.within / 2; }

void AddLendMetrics(const LendOptions::Loans& loans, bool lent, SampledMetrics& metrics) {
  metrics.AddGauge("attnd_lent", {}, [lent] { return lent; });
  for (const auto& [how, count] : {std::pair{"drained", loans.drained}, {"killed", loans.killed}}) {
    metrics.AddCounter("attnd_given_back_total", {{"how", how}},
                       [count = count] { return static_cast<double>(count); });
  }
}

absl::StatusOr<std::unique_ptr<Lender>> Lender::Start(const ServerOptions& options, char** argv,
                                                      Wait wait, Logger& log) {
  auto lender = std::unique_ptr<Lender>(new Lender(options, argv, std::move(wait), log));
  ASSIGN_OR_RETURN(lender->nvml_, Nvml::Load(options.nvml_library));
  ASSIGN_OR_RETURN(std::vector<std::string> uuids, lender->nvml_->Uuids());
  ASSIGN_OR_RETURN(lender->gpus_,
                   LentGpus(uuids, options.devices, std::getenv("CUDA_VISIBLE_DEVICES"),
                            std::getenv("CUDA_DEVICE_ORDER")));
  return lender;
}

absl::StatusOr<int> Lender::Run() {
  while (true) {
    ASSIGN_OR_RETURN(const bool free, WaitUntilFree());
    if (!free) return 0;
    ASSIGN_OR_RETURN(const std::optional<int> code, Lend());
    if (code.has_value()) return *code;
    if (stopping_) return 0;
  }
}

absl::StatusOr<std::vector<GpuUse>> Lender::Look() const {
  std::vector<GpuUse> uses;
  for (const std::string& gpu : gpus_) {
    ASSIGN_OR_RETURN(GpuUse use, nvml_->Use(gpu));
    uses.push_back(std::move(use));
  }
  return uses;
}

absl::StatusOr<bool> Lender::WaitUntilFree() {
  RemovePortFiles(options_);
  ASSIGN_OR_RETURN(auto port, WaitingPort::Open(options_, loans_));
  log_.Info("waiting_for_idle_gpus", {{"gpus", absl::StrJoin(gpus_, ",")},
                                      {"seconds", absl::ToDoubleSeconds(options_.lend.after)}});
  while (true) {
    ASSIGN_OR_RETURN(const std::vector<GpuUse> uses, Look());
    if (rule_.MayTake(uses, SteadyNow())) return true;
    BeatWatchdog();
    if (!wait_(kLook)) return false;
  }
}

absl::StatusOr<std::optional<int>> Lender::Lend() {
  ASSIGN_OR_RETURN(Child child, StartChild());
  log_.Info("lent", {{"process", child.process}});
  const absl::Time begin = SteadyNow();
  rule_.Taken(static_cast<unsigned>(child.process), begin);
  while (true) {
    if (std::optional<int> code = EndOf(child.process, WNOHANG)) return code;
    absl::StatusOr<std::vector<GpuUse>> uses = Look();
    absl::StatusOr<bool> claimed =
        uses.ok() ? rule_.MustGiveBack(*uses, SteadyNow()) : uses.status();
    if (!claimed.ok() || *claimed) GiveBack(child);
    if (!claimed.ok()) return claimed.status();
    if (*claimed) return std::nullopt;
    if (SteadyNow() - begin < kStart) BeatWatchdog();
    if (!wait_(kLook)) return Drain(child);
  }
}

absl::StatusOr<Lender::Child> Lender::StartChild() const {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return Failed("pipe", errno);
  FileDescriptor read_end(ends[0]), input(ends[1]);
  const std::vector<std::string> variables = ChildEnvironment(loans_);
  std::vector<char*> environment;
  for (const std::string& variable : variables) {
    environment.push_back(const_cast<char*>(variable.c_str()));
  }
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, read_end.get(), STDIN_FILENO);
  // Ctrl-C in a terminal reaches this process alone.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t process = 0;
  const int error =
      posix_spawn(&process, "/proc/self/exe", &actions, &attributes, argv_, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return Failed("posix_spawn", error);
  return Child{process, std::move(input)};
}

void Lender::GiveBack(Child& child) {
  const absl::Time begin = SteadyNow(), end = begin + options_.lend.within;
  child.input = FileDescriptor();
  std::optional<int> code;
  while (!(code = EndOf(child.process, WNOHANG)).has_value() && SteadyNow() < end) {
    stopping_ |= !wait_(kLookForEnd);
  }
  const bool killed = !code.has_value();
  if (killed) {
    kill(child.process, SIGKILL);
    EndOf(child.process, 0);
  }
  ++(killed ? loans_.killed : loans_.drained);
  log_.Info("given_back", {{"seconds", absl::ToDoubleSeconds(SteadyNow() - begin)},
                           {"how", killed ? "killed" : "drained"}});
}

// As its flags say; a second signal cuts it short.
int Lender::Drain(const Child& child) {
  (void)!write(child.input.get(), "\n", 1);
  while (true) {
    if (std::optional<int> code = EndOf(child.process, WNOHANG)) return *code;
    if (!wait_(kLookForEnd)) kill(child.process, SIGTERM);
  }
}

void Lender::BeatWatchdog() {
  if (SteadyNow() < next_beat_) return;
  next_beat_ = SteadyNow() + WatchdogPeriod() / 3;
  (void)NotifyServiceManager("WATCHDOG=1");
}

}  // namespace attnd
