// SteadyCondVar: a condition variable beside an absl::Mutex, whose waits end by steady time. Those
// of absl::CondVar end by the system's clock: when it is set back, they last longer by as much. Any
// thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

class SteadyCondVar {
 public:
  // The thread has locked `mutex`. It may wake for no reason, as of any condition variable. False:
  // the time has come.
  bool WaitUntil(absl::Mutex& mutex, absl::Time steady) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return WaitFor(mutex, steady - SteadyNow());
  }
  bool WaitFor(absl::Mutex& mutex, absl::Duration time) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Lockable lock{mutex};
    if (time <= absl::ZeroDuration()) return false;
    if (time == absl::InfiniteDuration()) {
      changed_.wait(lock);
      return true;
    }
    const absl::Duration at_once = absl::Hours(1);  // which a chrono duration holds
    const bool woken =
        changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(time, at_once))) ==
        std::cv_status::no_timeout;
    return woken || time > at_once;
  }
  void Signal() { changed_.notify_one(); }
  void SignalAll() { changed_.notify_all(); }

 private:
  struct Lockable {
    absl::Mutex& mutex;
    void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex.Lock(); }
    void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex.Unlock(); }
  };
  std::condition_variable_any changed_;
};

}  // namespace attnd
