// SharedSession: the uses of one control connection's memory by calls: which run, and which may not
// begin any more. A caller that has given up on a call learns from it when the daemon no longer
// uses the memory.
//
// Invariant: a use that EndUse was asked for never begins afterwards. Any thread.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class SharedSession {
 public:
  // Uses ended before they began that are remembered; beyond, EndUse gives kTooMany.
  static constexpr size_t kMaxEndedUses = 1 << 16;
  enum class End { kEnded, kRuns, kTooMany };

  // `on_ended` is called with a lock held, from the thread of the call that ends; it does not
  // block.
  explicit SharedSession(std::function<void(uint64_t use)> on_ended)
      : on_ended_(std::move(on_ended)) {}

  // False when it runs already, has been ended, or the session is closed.
  bool Begin(uint64_t use);
  // The call has let go of the memory.
  void Finish(uint64_t use);
  // kRuns: `on_ended` will be called for it.
  End EndUse(uint64_t use);
  // No use begins and `on_ended` is not called any more.
  void Close();

 private:
  absl::Mutex mutex_;
  std::function<void(uint64_t)> on_ended_ ABSL_GUARDED_BY(mutex_);  // null: closed
  absl::flat_hash_set<uint64_t> running_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<uint64_t> awaited_ ABSL_GUARDED_BY(mutex_);  // of those running
  absl::flat_hash_set<uint64_t> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
