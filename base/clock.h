// Clock: where time comes from, so that tests of deadlines never sleep. Any thread.
//
// Deadlines, estimates and durations are told in steady time, which no step of the system's clock
// moves. It is an absl::Time too, near the system's clock for whoever reads it, but only WallTime
// is what other processes, files and gRPC know.
#pragma once

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace attnd {

// The system's clock when this was first asked, and what has passed since.
absl::Time SteadyNow();
// A moment by the system's clock as it is set now.
inline absl::Time WallTime(absl::Time steady) { return absl::Now() + (steady - SteadyNow()); }

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return SteadyNow(); }
};

// Stands still until a test moves it.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() const override {
    absl::MutexLock lock(&mutex_);
    return now_;
  }
  void Advance(absl::Duration step) {
    absl::MutexLock lock(&mutex_);
    now_ += step;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
