#include "server/modules/compute_turns.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/stop_wakes.h"

namespace attnd {

ComputeTurns::Place::Place(ComputeTurns& turns, const TurnWish& wish) : turns_(turns), wish_(wish) {
  absl::MutexLock lock(&turns_.mutex_);
  number_ = ++turns_.last_number_;
  Caller& caller = turns_.callers_[wish_.caller];
  if (caller.places.empty()) caller.had = std::max(caller.had, turns_.start_);
  caller.places.push_back(this);
}

ComputeTurns::Place::~Place() {
  absl::MutexLock lock(&turns_.mutex_);
  turns_.EndTurn(*this);
  std::erase(turns_.callers_[wish_.caller].places, this);
  turns_.ForgetIdle();
  turns_.CallNext();
}

bool ComputeTurns::Place::Take() {
  const StopWakes wakes(wish_.stop, turns_.mutex_);
  absl::MutexLock lock(&turns_.mutex_);
  waits_ = true;
  turns_.CallNext();
  auto ready = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return turns_.holder_ == this || wish_.stop.stop_requested();
  };
  turns_.mutex_.AwaitWithTimeout(absl::Condition(&ready), wish_.deadline - SteadyNow());
  waits_ = false;
  return turns_.holder_ == this;
}

void ComputeTurns::Place::TakeAgain() {
  absl::MutexLock lock(&turns_.mutex_);
  waits_ = true;
  turns_.CallNext();
  auto ready = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_.holder_ == this; };
  turns_.mutex_.Await(absl::Condition(&ready));
}

bool ComputeTurns::Place::IsWanted() const {
  absl::ReaderMutexLock lock(&turns_.mutex_);
  const double took = turns_.now_() - began_;
  if (turns_.holder_ != this || took < kSlice) return false;
  const double had = turns_.callers_.at(wish_.caller).had + took;
  return std::any_of(turns_.callers_.begin(), turns_.callers_.end(), [&](const auto& entry) {
    return entry.first != wish_.caller && entry.second.had < had && NextOf(entry.second) != nullptr;
  });
}

void ComputeTurns::Place::Give() {
  absl::MutexLock lock(&turns_.mutex_);
  turns_.EndTurn(*this);
  turns_.CallNext();
}

double ComputeTurns::Place::computed_seconds() const {
  absl::ReaderMutexLock lock(&turns_.mutex_);
  return turns_.ComputedBy(*this);
}

int ComputeTurns::waiting() const {
  absl::ReaderMutexLock lock(&mutex_);
  int64_t calls = 0;
  for (const auto& [name, caller] : callers_) {
    calls += std::count_if(caller.places.begin(), caller.places.end(),
                           [](const Place* place) { return place->waits_; });
  }
  return static_cast<int>(calls);
}

double ComputeTurns::QueueSeconds() const {
  absl::ReaderMutexLock lock(&mutex_);
  double seconds = 0;
  for (const auto& [name, caller] : callers_) seconds += LeftOf(caller);
  return seconds;
}

double ComputeTurns::SecondsUntilDone(const std::string& caller, double seconds) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto own = callers_.find(caller);
  if (own != callers_.end()) seconds += LeftOf(own->second);
  double all = seconds;
  for (const auto& [name, other] : callers_) {
    if (name != caller) all += std::min(LeftOf(other), seconds);
  }
  return all;
}

double ComputeTurns::ComputedBy(const Place& place) const {
  return place.computed_ + (holder_ == &place ? now_() - place.began_ : 0);
}

double ComputeTurns::LeftOf(const Caller& caller) const {
  double seconds = 0;
  for (const Place* place : caller.places) {
    seconds += std::max(0.0, place->wish_.seconds - ComputedBy(*place));
  }
  return seconds;
}

ComputeTurns::Place* ComputeTurns::NextOf(const Caller& caller) {
  Place* next = nullptr;
  for (Place* place : caller.places) {
    if (!place->waits_) continue;
    const auto order = [](const Place& of) { return std::pair(of.wish_.deadline, of.number_); };
    if (next == nullptr || order(*place) < order(*next)) next = place;
  }
  return next;
}

void ComputeTurns::EndTurn(Place& place) {
  if (holder_ != &place) return;
  const double took = now_() - place.began_;
  place.computed_ += took;
  place.work_.reset();
  callers_[place.wish_.caller].had += took;
  holder_ = nullptr;
}

// The caller that has had least is next; if several have had as much, the call that came first.
void ComputeTurns::CallNext() {
  if (holder_ != nullptr) return;
  Place* next = nullptr;
  double least = 0;
  for (const auto& [name, caller] : callers_) {
    Place* place = NextOf(caller);
    if (place == nullptr) continue;
    const auto order = std::pair(caller.had, place->number_);
    if (next != nullptr && order > std::pair(least, next->number_)) continue;
    next = place;
    least = caller.had;
  }
  if (next == nullptr) return;
  start_ = std::max(start_, least);
  next->waits_ = false;
  next->began_ = now_();
  // A call that must be finished may have waited beyond its deadline.
  next->work_.emplace(watch_.Begin(std::max(next->wish_.deadline, SteadyNow())));
  holder_ = next;
}

// A caller that would begin where the others are has nothing to be remembered for.
void ComputeTurns::ForgetIdle() {
  const bool all_idle = std::all_of(callers_.begin(), callers_.end(),
                                    [](const auto& entry) { return entry.second.places.empty(); });
  std::erase_if(callers_, [&](const auto& entry) {
    return entry.second.places.empty() && (all_idle || entry.second.had <= start_);
  });
}

}  // namespace attnd
