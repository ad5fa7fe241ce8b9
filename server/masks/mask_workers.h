// MaskWorkers: threads for the calls whose mask has to be compiled, milliseconds to seconds of work
// that would keep a thread which receives calls from all others. Callers take turns, and none has
// more than one thread at a time: whoever sends expensive masks delays itself.
// Threads: any may call Run; what it is given runs once, on one of these threads.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class MaskWorkers {
 public:
  explicit MaskWorkers(int threads);
  // Runs what is left, then joins.
  ~MaskWorkers();

  // The queues are bounded: an entry is a call, of as many as connections may have open at a time.
  void Run(absl::string_view caller, std::function<void()> work);

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

  absl::Mutex mutex_;
  std::map<std::string, Caller, std::less<>> callers_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> turns_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnd
