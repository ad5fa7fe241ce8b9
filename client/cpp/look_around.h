// LookAround: lets the caller look after other things while his thread waits for a call.
//
// Whoever waits on the caller's thread waits no longer than kInterval at a time and then calls
// Now(). Threads: the caller's alone.
#pragma once

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace attnd {

class LookAround {
 public:
  static constexpr absl::Duration kInterval = absl::Milliseconds(50);

  // `look` may be null; outlives it.
  explicit LookAround(const std::function<void()>& look)
      : look_(look), due_(absl::Now() + kInterval) {}

  void Now() {
    absl::Time now = absl::Now();
    if (look_ == nullptr || now < due_) return;
    due_ = now + kInterval;
    look_();
  }

 private:
  const std::function<void()>& look_;
  absl::Time due_;
};

}  // namespace attnd
