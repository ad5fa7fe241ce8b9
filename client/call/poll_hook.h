// PollHook: calls CallOptions::poll_hook every kInterval while the caller's thread waits for a
// call. Code that blocks there waits for at most kInterval at a time and then calls Poll().
// Threads: the caller's alone.
#pragma once

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace attnd {

class PollHook {
 public:
  static constexpr absl::Duration kInterval = absl::Milliseconds(50);

  // `hook` may be null; outlives it.
  explicit PollHook(const std::function<void()>& hook)
      : hook_(hook), due_(absl::Now() + kInterval) {}

  void Poll() {
    absl::Time now = absl::Now();
    if (hook_ == nullptr || now < due_) return;
    due_ = now + kInterval;
    hook_();
  }

 private:
  const std::function<void()>& hook_;
  absl::Time due_;
};

}  // namespace attnd
