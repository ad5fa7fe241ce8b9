// WorkerGate: lets helpers into a call while it lasts. A helper that comes late finds it closed, so
// the call need not wait for threads that are busy elsewhere. Any thread.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/call/poll_hook.h"

namespace attnd {

class WorkerGate {
 public:
  bool Enter() {
    absl::MutexLock lock(&mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }
  void Leave() {
    absl::MutexLock lock(&mutex_);
    --inside_;
  }
  void CloseAndWait(PollHook& poll_hook) {
    auto empty = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return inside_ == 0; };
    bool done = false;
    while (!done) {
      {
        absl::MutexLock lock(&mutex_);
        closed_ = true;
        done = mutex_.AwaitWithTimeout(absl::Condition(&empty), PollHook::kInterval);
      }
      poll_hook.Poll();
    }
  }

 private:
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
