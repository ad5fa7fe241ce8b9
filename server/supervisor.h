// Supervisor: runs the server in a child process and starts it again when it fails, waiting longer
// each time, so that a lost device or a crash costs seconds. The parent holds no device, no port
// and no thread.
//
// SIGTERM and SIGINT are passed on to the child. It is not started again after exit code 0, after
// bad options, and when one of those signals came. Its exit code becomes the parent's; a signal n
// that killed it becomes 128 + n. A child whose parent dies is told to drain (SIGTERM).
// Under systemd or Kubernetes leave restarting to them.
#pragma once

#include <functional>

#include "absl/time/time.h"
#include "base/log.h"

namespace attnd {

struct SupervisorOptions {
  absl::Duration first_delay = absl::Seconds(1);  // doubled at each failure
  absl::Duration longest_delay = absl::Minutes(1);
  absl::Duration healthy = absl::Minutes(1);  // a child that lived so long starts the delays afresh
  int final_exit_code = 2;                    // starting again would not help
};

// `serve` runs in the child and gives its exit code. Called before any thread starts, with SIGTERM
// and SIGINT blocked.
int Supervise(const std::function<int()>& serve, const SupervisorOptions& options, Logger& log);

}  // namespace attnd
