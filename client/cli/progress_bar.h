// ProgressBar: one line on a terminal's standard error, for work that lasts longer than a second.
// Any thread may report.
#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class ProgressBar {
 public:
  // `enabled`: standard error is a terminal; otherwise nothing is ever shown.
  ProgressBar(std::string label, int64_t total, bool enabled);
  ~ProgressBar();  // takes the line away
  void Show(int64_t done);

 private:
  const std::string label_;
  const int64_t total_;
  const bool enabled_;
  absl::Mutex mutex_;
  const absl::Time start_;
  absl::Time last_shown_ ABSL_GUARDED_BY(mutex_);
  bool shown_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attnd
