// ModuleLoad: how much work the calls of modules that are under way are, for those who choose a
// server: their number times what one has taken of late. Any thread.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class ModuleLoad {
 public:
  void Began() {
    absl::MutexLock lock(&mutex_);
    ++open_;
  }
  // `compute`: the device's time that it has taken; 0: it computed nothing.
  void Ended(absl::Duration compute) {
    absl::MutexLock lock(&mutex_);
    --open_;
    if (compute <= absl::ZeroDuration()) return;
    mean_ += (compute - mean_) / kMemory;
  }
  absl::Duration Queue() const {
    absl::MutexLock lock(&mutex_);
    return open_ * mean_;
  }

 private:
  static constexpr int kMemory = 16;  // calls

  mutable absl::Mutex mutex_;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration mean_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
