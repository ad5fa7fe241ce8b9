// WorkWatch: work that is under way, each piece with the time from which it counts as stuck. It
// stops nothing: whoever watches the process asks it (AttndServer::CheckAlive). Any thread.
#pragma once

#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

// Beyond the time that the work may take.
inline constexpr absl::Duration kStuckAfter = absl::Seconds(30);

class WorkWatch {
 public:
  // Under way while it lives. The watch outlives it.
  class Work {
   public:
    Work() = default;
    Work(Work&& other) noexcept
        : watch_(std::exchange(other.watch_, nullptr)), stuck_at_(other.stuck_at_) {}
    Work& operator=(Work&&) = delete;
    ~Work() {
      if (watch_ != nullptr) watch_->End(stuck_at_);
    }

   private:
    friend class WorkWatch;
    Work(WorkWatch& watch, absl::Time stuck_at) : watch_(&watch), stuck_at_(stuck_at) {}
    WorkWatch* watch_ = nullptr;
    absl::Time stuck_at_;
  };

  // Work that must have ended by `end`, and is stuck kStuckAfter later.
  Work Begin(absl::Time end) {
    const absl::Time stuck_at = end + kStuckAfter;
    absl::MutexLock lock(&mutex_);
    stuck_at_.insert(stuck_at);
    return Work(*this, stuck_at);
  }
  // The first time at which a piece counts as stuck; InfiniteFuture while nothing is under way.
  absl::Time stuck_at() const {
    absl::MutexLock lock(&mutex_);
    return stuck_at_.empty() ? absl::InfiniteFuture() : *stuck_at_.begin();
  }

 private:
  void End(absl::Time stuck_at) {
    absl::MutexLock lock(&mutex_);
    stuck_at_.erase(stuck_at_.find(stuck_at));
  }

  mutable absl::Mutex mutex_;
  std::multiset<absl::Time> stuck_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
