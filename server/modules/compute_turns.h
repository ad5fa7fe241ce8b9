// ComputeTurns: who computes on a device next. One call at a time; callers that wait have turns in
// rotation, so that one with many calls does not keep the others waiting. Any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/work_watch.h"

namespace attnd {

class ComputeTurns {
 public:
  // Holds the device while it lives; empty: the call was stopped, or its time was up.
  class Turn {
   public:
    Turn() = default;
    Turn(ComputeTurns& turns, WorkWatch::Work work) : turns_(&turns), work_(std::move(work)) {}
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), work_(std::move(other.work_)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn();
    explicit operator bool() const { return turns_ != nullptr; }

   private:
    ComputeTurns* turns_ = nullptr;
    WorkWatch::Work work_;
  };

  Turn Take(const std::string& caller, const std::stop_token& stop, absl::Time deadline);
  int waiting() const;
  // When the call that has the device counts as stuck: it was to end by its deadline.
  absl::Time stuck_at() const { return watch_.stuck_at(); }

 private:
  struct Waiter {
    bool called = false;
  };
  void CallNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(const std::string& caller, Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  WorkWatch watch_;
  mutable absl::Mutex mutex_;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  std::string last_ ABSL_GUARDED_BY(mutex_);  // caller that had the last turn
  std::map<std::string, std::deque<Waiter*>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
