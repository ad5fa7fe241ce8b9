#include "server/supervisor.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/time/clock.h"

namespace attnd {
namespace {

sigset_t Awaited() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, signal);
  return signals;
}

struct ChildEnd {
  int code = 0;
  bool told_to_stop = false;
};

// Passes signals on until the child has ended.
ChildEnd WaitForChild(pid_t child) {
  ChildEnd end;
  const sigset_t signals = Awaited();
  while (true) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      end.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return end;
    }
    int signal = 0;
    sigwait(&signals, &signal);
    if (signal == SIGCHLD) continue;
    end.told_to_stop = true;
    kill(child, signal);
  }
}

pid_t StartChild(const std::function<int()>& serve) {
  const pid_t parent = getpid();
  std::fflush(nullptr);  // or the child would write it again
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) std::_Exit(1);  // it died meanwhile
  std::exit(serve());
}

// True when a signal to stop came instead.
bool StopsWithin(absl::Duration delay) {
  sigset_t signals = Awaited();
  sigdelset(&signals, SIGCHLD);
  const timespec wait = absl::ToTimespec(delay);
  return sigtimedwait(&signals, nullptr, &wait) > 0;
}

}  // namespace

int Supervise(const std::function<int()>& serve, const SupervisorOptions& options, Logger& log) {
  const sigset_t signals = Awaited();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  absl::Duration delay = options.first_delay;
  while (true) {
    const absl::Time begin = absl::Now();
    const pid_t child = StartChild(serve);
    if (child < 0) {
      log.Error("supervisor_cannot_fork");
      return 1;
    }
    const ChildEnd end = WaitForChild(child);
    if (end.code == 0 || end.code == options.final_exit_code || end.told_to_stop) return end.code;
    if (absl::Now() - begin >= options.healthy) delay = options.first_delay;
    log.Error("server_failed",
              {{"exit_code", end.code}, {"restart_in_seconds", absl::ToDoubleSeconds(delay)}});
    if (StopsWithin(delay)) return end.code;
    delay = std::min(2 * delay, options.longest_delay);
  }
}

}  // namespace attnd
