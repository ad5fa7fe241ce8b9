#include "server/modules/compute_turns.h"

#include <algorithm>

#include "server/modules/stop_wakes.h"

namespace attnd {

ComputeTurns::Turn::~Turn() {
  if (turns_ == nullptr) return;
  absl::MutexLock lock(&turns_->mutex_);
  turns_->busy_ = false;
  turns_->CallNext();
}

ComputeTurns::Turn ComputeTurns::Take(const std::string& caller, const std::stop_token& stop,
                                      absl::Time deadline) {
  Waiter waiter;
  const StopWakes wakes(stop, mutex_);
  absl::MutexLock lock(&mutex_);
  waiting_[caller].push_back(&waiter);
  CallNext();
  auto ready = [&] { return waiter.called || stop.stop_requested(); };
  mutex_.AwaitWithDeadline(absl::Condition(&ready), deadline);
  if (waiter.called) return Turn(*this, watch_.Begin(deadline));
  Leave(caller, waiter);
  return Turn();
}

int ComputeTurns::waiting() const {
  absl::MutexLock lock(&mutex_);
  size_t calls = 0;
  for (const auto& [caller, waiters] : waiting_) calls += waiters.size();
  return static_cast<int>(calls);
}

// The first caller after the last one, by name, around the end.
void ComputeTurns::CallNext() {
  if (busy_ || waiting_.empty()) return;
  auto next = waiting_.upper_bound(last_);
  if (next == waiting_.end()) next = waiting_.begin();
  Waiter& waiter = *next->second.front();
  last_ = next->first;
  Leave(last_, waiter);
  waiter.called = true;
  busy_ = true;
}

void ComputeTurns::Leave(const std::string& caller, Waiter& waiter) {
  auto of = waiting_.find(caller);
  std::erase(of->second, &waiter);
  if (of->second.empty()) waiting_.erase(of);
}

}  // namespace attnd
