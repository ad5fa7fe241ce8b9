#include "client/cpp/shard_race.h"

#include <utility>

namespace attnd {

bool ShardRace::CanJoinLocked() const { return !joined_ && running_ > 0 && winner_ == nullptr; }

bool ShardRace::CanJoin() {
  absl::MutexLock lock(&mutex_);
  return CanJoinLocked();
}

bool ShardRace::Join() {
  absl::MutexLock lock(&mutex_);
  if (!CanJoinLocked()) return false;
  joined_ = true;
  ++running_;
  return true;
}

void ShardRace::Enter(const void* attempt, std::function<void()> cancel) {
  absl::MutexLock lock(&mutex_);
  if (winner_ != nullptr) cancel();
  cancels_.emplace(attempt, std::move(cancel));
}

bool ShardRace::ClaimLocked(const void* attempt) {
  if (winner_ != nullptr) return winner_ == attempt;
  winner_ = attempt;
  for (const auto& [other, cancel] : cancels_) {
    if (other != attempt) cancel();
  }
  return true;
}

bool ShardRace::Claim(const void* attempt) {
  absl::MutexLock lock(&mutex_);
  return ClaimLocked(attempt);
}

bool ShardRace::Lost(const void* attempt) {
  absl::MutexLock lock(&mutex_);
  return winner_ != nullptr && winner_ != attempt;
}

ShardRace::Finish ShardRace::Leave(const void* attempt, bool succeeded) {
  absl::MutexLock lock(&mutex_);
  cancels_.erase(attempt);
  --running_;
  if (succeeded) return ClaimLocked(attempt) ? Finish::kWon : Finish::kLost;
  if (winner_ == attempt) winner_ = nullptr;  // it broke off; the other has been cancelled
  return running_ > 0 || winner_ != nullptr ? Finish::kLost : Finish::kFailed;
}

}  // namespace attnd
