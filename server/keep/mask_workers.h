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
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class MaskWorkers {
 public:
  // Of a caller at most `caller_max_calls` (1 or more) wait, besides the one that runs.
  MaskWorkers(int threads, int64_t caller_max_calls);
  // Runs what is left, then joins.
  ~MaskWorkers();

  // RESOURCE_EXHAUSTED TENANT_QUOTA when as many of the caller wait already: not taken.
  absl::Status Run(absl::string_view caller, std::function<void()> work);
  int64_t waiting() const;  // of all callers

 private:
  // In turns_, or with a thread that works for it.
  struct Caller {
    std::deque<std::function<void()>> waiting;
  };
  void Main();
  // Waits for a caller whose turn it is. False: all is done.
  bool Take(std::string& caller, std::function<void()>& work);
  // The caller's work is done: the next of it has its turn after the others'.
  void GiveBack(const std::string& caller);

  const int64_t caller_max_calls_;
  mutable absl::Mutex mutex_;
  int64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Caller, std::less<>> callers_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> turns_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnd
