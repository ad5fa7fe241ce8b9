// How long calls of modules take, learned from those that have ended. Any thread.
//
// ModuleLoad   how much work the calls of modules that are under way are, for those who choose a
//              server: their number times what one has taken of late
// CallPace     how long one module's calls take
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

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

enum class PacedCall : uint8_t { kForward, kBackward, kStep };

class CallPace {
 public:
  // 0 before the first call of the kind.
  double SecondsFor(PacedCall kind, int64_t rows) const {
    return pace_[static_cast<size_t>(kind)].load() * static_cast<double>(rows);
  }
  // A call took `seconds` of its devices. Later calls count more than earlier ones; of two at a
  // time one may be lost.
  void Took(PacedCall kind, int64_t rows, double seconds) {
    std::atomic<double>& pace = pace_[static_cast<size_t>(kind)];
    const double before = pace.load(), now = seconds / static_cast<double>(rows);
    pace = before == 0 ? now : before + kWeight * (now - before);
  }

 private:
  static constexpr double kWeight = 0.3;       // of the last call
  std::array<std::atomic<double>, 3> pace_{};  // seconds a row
};

}  // namespace attnd
