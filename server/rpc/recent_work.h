// RecentWork: how many calls a server has answered of late and how busy they kept its devices, for
// load reports. Sums that forget: what was kMemory ago counts 1/e. Any thread.
#pragma once

#include <algorithm>
#include <cmath>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

class RecentWork {
 public:
  static constexpr absl::Duration kMemory = absl::Seconds(10);

  // `clock` outlives it.
  RecentWork(const Clock& clock, int devices) : clock_(clock), devices_(devices) {}

  // A call was answered, whose work took `compute` of its device.
  void Answered(absl::Duration compute) {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    const double kept = KeptSince(now);
    calls_ = kept * calls_ + 1;
    busy_ = kept * busy_ + absl::ToDoubleSeconds(compute);
    last_ = now;
  }

  struct Rates {
    double calls = 0;  // a second
    double busy = 0;   // the share of the devices' time; above 1 where one does several at once
  };
  Rates rates() const {
    absl::MutexLock lock(&mutex_);
    const double seconds = absl::ToDoubleSeconds(kMemory), kept = KeptSince(clock_.Now());
    return {kept * calls_ / seconds, kept * busy_ / seconds / devices_};
  }

  // For a gauge: 0 once hardly anything is left.
  double busy_ratio() const {
    const double busy = rates().busy;
    return busy < 1e-3 ? 0 : std::min(busy, 1.0);
  }

 private:
  double KeptSince(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::exp(-std::max(absl::FDivDuration(now - last_, kMemory), 0.0));
  }

  const Clock& clock_;
  const int devices_;
  mutable absl::Mutex mutex_;
  absl::Time last_ ABSL_GUARDED_BY(mutex_);
  double calls_ ABSL_GUARDED_BY(mutex_) = 0, busy_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
