// Periodic: a thread that does the same piece of work once in each period of steady time, the first
// time a period after the start, until it is destroyed. The destructor waits for work that is under
// way; it does not wait out the period. Made for work that looks at a state (of a file, of a table
// with a Clock) and acts on it: tests call that work themselves, or take a period of a millisecond.
// Threads: one makes and destroys it, never the work itself.
#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_cond_var.h"

namespace attnd {

class Periodic {
 public:
  // Everything that `work` uses outlives this: as a member it stands behind all of that.
  Periodic(absl::Duration period, std::function<void()> work);
  ~Periodic();
  Periodic(const Periodic&) = delete;
  Periodic& operator=(const Periodic&) = delete;

 private:
  absl::Mutex mutex_;
  SteadyCondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attnd
