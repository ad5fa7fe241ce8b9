// StopWakes: while it lives, a stop makes whoever waits under `mutex` look again at what it waits
// for. Make it before the mutex is locked; let it go after.
#pragma once

#include <functional>
#include <stop_token>

#include "absl/synchronization/mutex.h"

namespace attnd {

class StopWakes {
 public:
  StopWakes(const std::stop_token& stop, absl::Mutex& mutex)
      : wake_(stop, [&mutex] { absl::MutexLock lock(&mutex); }) {}

 private:
  std::stop_callback<std::function<void()>> wake_;
};

}  // namespace attnd
