// CallLogLimit: how many lines about failed calls, or another failure that repeats, are written.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

// At most kLinesPerSecond lines about failed calls a second, or `lines` in each `period`, so that a
// caller who repeats a mistake cannot fill the disk; the next line that is written tells how many
// were left out. Any thread.
class CallLogLimit {
 public:
  static constexpr int64_t kLinesPerSecond = 20;
  CallLogLimit() = default;
  CallLogLimit(int64_t lines, absl::Duration period) : most_(lines), period_(period) {}
  // Lines left out since the last one, or nothing when this one is too many.
  std::optional<int64_t> Take(absl::Time now);

 private:
  const int64_t most_ = kLinesPerSecond;
  const absl::Duration period_ = absl::Seconds(1);
  absl::Mutex mutex_;
  int64_t number_ ABSL_GUARDED_BY(mutex_) = 0;  // of the period
  int64_t lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
