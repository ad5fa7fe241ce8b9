// MaskWorkers: threads for the calls whose mask has to be compiled, milliseconds to seconds of work
// that would keep a thread which receives calls from all others. Callers take turns, and none has
// more than one thread at a time: whoever sends expensive masks delays itself.
// Threads: any may call Run; what it takes runs once, on one of these threads.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/task_queue.h"

namespace attnd {

class MaskWorkers {
 public:
  // At most `caller_max_calls` (1 or more) of a caller wait, besides the one that runs.
  MaskWorkers(int threads, int64_t caller_max_calls)
      : caller_max_calls_(caller_max_calls), turns_(threads) {}

  // RESOURCE_EXHAUSTED TENANT_QUOTA when as many of the caller wait already: not taken.
  absl::Status Run(absl::string_view caller, std::function<void()> work);
  int64_t waiting() const;  // of all callers

 private:
  // Runs the caller's next work; then, if it has more, its turn comes after the others'.
  void TakeTurn(const std::string& caller);
  std::function<void()> Next(const std::string& caller);

  const int64_t caller_max_calls_;
  mutable absl::Mutex mutex_;
  int64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  // The waiting work of each caller that has a turn, or whose turn it is.
  std::map<std::string, std::deque<std::function<void()>>> callers_ ABSL_GUARDED_BY(mutex_);
  TaskQueue turns_;  // one of each caller; goes first, and runs what is left
};

}  // namespace attnd
