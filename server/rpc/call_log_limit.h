// CallLogLimit: how many lines about failed calls are written.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

// At most kLinesPerSecond lines about failed calls a second, so that a caller who repeats a mistake
// cannot fill the disk; the next line that is written tells how many were left out. Any thread.
class CallLogLimit {
 public:
  static constexpr int64_t kLinesPerSecond = 20;
  // Lines left out since the last one, or nothing when this one is too many.
  std::optional<int64_t> Take(absl::Time now);

 private:
  absl::Mutex mutex_;
  int64_t second_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
