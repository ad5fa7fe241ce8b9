// LaunchTurns: which slices stand in a device's compute queue: at most kDepth, in the order in
// which they asked. Two: one runs, one stands behind it, so that the device never idles and what is
// cancelled meanwhile is found before it is launched. A launch that holds a turn asks for another
// by TryTake alone: two that each waited for the other's would wait for ever. Any thread.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd::cuda {

class LaunchTurns {
 public:
  static constexpr int kDepth = 2;

  void Take() {
    absl::MutexLock lock(&mutex_);
    const uint64_t ticket = next_++;
    auto mine = [this, ticket]()
                    ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ticket < given_back_ + kDepth; };
    mutex_.Await(absl::Condition(&mine));
  }
  // False, at once, where another asked before or all turns are taken.
  bool TryTake() {
    absl::MutexLock lock(&mutex_);
    if (next_ >= given_back_ + kDepth) return false;
    ++next_;
    return true;
  }
  void Give() {
    absl::MutexLock lock(&mutex_);
    ++given_back_;
  }

 private:
  absl::Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t given_back_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::cuda
