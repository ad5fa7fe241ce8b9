// PollHook: calls CallOptions::poll_hook every kInterval while the caller's thread waits for a
// call. Code that blocks there waits for at most kInterval at a time and then calls Poll().
// Threads: the caller's alone.
#pragma once

#include <algorithm>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "client/types/call_options.h"

namespace attnd {

class PollHook {
 public:
  static constexpr absl::Duration kInterval = absl::Milliseconds(50);

  // `hook` may be null; outlives it.
  explicit PollHook(const std::function<void()>& hook)
      : hook_(hook), due_(SteadyNow() + kInterval) {}

  void Poll() {
    absl::Time now = SteadyNow();
    if (hook_ == nullptr || now < due_) return;
    due_ = now + kInterval;
    hook_();
  }

 private:
  const std::function<void()>& hook_;
  absl::Time due_;
};

// CANCELLED as soon as the caller cancels the call that waits.
inline absl::Status WaitFor(absl::Duration delay, const CallOptions& options) {
  PollHook poll_hook(options.poll_hook);
  for (absl::Time until = SteadyNow() + delay; SteadyNow() < until; poll_hook.Poll()) {
    if (options.stop.stop_requested()) break;
    absl::SleepFor(std::min(until - SteadyNow(), PollHook::kInterval));
  }
  if (!options.stop.stop_requested()) return absl::OkStatus();
  return absl::CancelledError("the caller cancelled the call");
}

}  // namespace attnd
