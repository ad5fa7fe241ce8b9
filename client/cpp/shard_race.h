// ShardRace: which of a shard's attempts may write its result, where a second copy (a hedge) runs
// beside the first. The first that has a result wins and the other is cancelled; an attempt that
// fails leaves the shard to the other.
//
// Threads: any. Attempts are told apart by their address.
#pragma once

#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class ShardRace {
 public:
  enum class Finish {
    kWon,     // its result is the shard's
    kLost,    // somebody else has the shard, or still tries
    kFailed,  // it failed, and it was the last
  };

  bool CanJoin();
  // A second attempt will Enter or Leave; false when there was one, or the shard is not to be had.
  bool Join();
  // `cancel` ends the attempt: at once if the race is decided, else when another has won. It is not
  // called after Leave.
  void Enter(const void* attempt, std::function<void()> cancel);
  // Before the first byte of its result is written: false when it has lost.
  bool Claim(const void* attempt);
  bool Lost(const void* attempt);
  Finish Leave(const void* attempt, bool succeeded);

 private:
  bool CanJoinLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool ClaimLocked(const void* attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_) = 1;
  bool joined_ ABSL_GUARDED_BY(mutex_) = false;
  const void* winner_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::map<const void*, std::function<void()>> cancels_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
