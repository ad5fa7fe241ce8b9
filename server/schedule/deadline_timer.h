// DeadlineTimer: calls back when a call's deadline passes, wherever the call is then. One thread;
// Add and Remove from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_cond_var.h"

namespace attnd {

class DeadlineTimer {
 public:
  // `expired` runs on the timer's thread, without its lock.
  explicit DeadlineTimer(std::function<void(uint64_t id)> expired);
  ~DeadlineTimer();

  void Add(uint64_t id, absl::Time deadline);
  void Remove(uint64_t id, absl::Time deadline);

 private:
  void Main();

  const std::function<void(uint64_t)> expired_;
  absl::Mutex mutex_;
  SteadyCondVar changed_;
  std::set<std::pair<absl::Time, uint64_t>> pending_ ABSL_GUARDED_BY(mutex_);
  // Until when the thread sleeps: a later deadline need not wake it, so that a call which is
  // answered in time costs no switch of threads.
  absl::Time wakes_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attnd
