#include "server/schedule/deadline_timer.h"

#include <utility>

#include "base/clock.h"

namespace attnd {

DeadlineTimer::DeadlineTimer(std::function<void(uint64_t)> expired)
    : expired_(std::move(expired)), thread_([this] { Main(); }) {}

DeadlineTimer::~DeadlineTimer() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void DeadlineTimer::Add(uint64_t id, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  pending_.emplace(deadline, id);
  if (deadline < wakes_at_) changed_.Signal();
}

void DeadlineTimer::Remove(uint64_t id, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  pending_.erase({deadline, id});
}

void DeadlineTimer::Main() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    if (pending_.empty() || SteadyNow() < pending_.begin()->first) {
      wakes_at_ = pending_.empty() ? absl::InfiniteFuture() : pending_.begin()->first;
      changed_.WaitUntil(mutex_, wakes_at_);
      continue;
    }
    uint64_t id = pending_.begin()->second;
    pending_.erase(pending_.begin());
    mutex_.Unlock();
    expired_(id);
    mutex_.Lock();
  }
}

}  // namespace attnd
