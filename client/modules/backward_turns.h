// BackwardTurns: the order in which backwards that threads call beside each other get their
// numbers, so that their gradients are added in the order in which turns were reserved.
//
//     Reserve → Await: each turn before it has begun → Begin: it has its number → Try, as often as
//     needed → End, or GiveUp
//
// The server adds a micro-batch once those before it are there, so one that never comes leaves
// those behind it nothing to wait for: GiveUp ends their turns as well, and stops their calls.
// Whoever changes the module for all calls makes a Pause: calls under way are stopped, and tried
// again after it, since one that waits at the server for another would hold the module until its
// deadline.
//
// Threads: any. A turn has one call.
#pragma once

#include <cstdint>
#include <map>
#include <stop_token>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/types/call_options.h"

namespace attnd {

class BackwardTurns {
 public:
  class Pause {
   public:
    explicit Pause(BackwardTurns& turns);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    BackwardTurns& turns_;
  };

  uint64_t Reserve();  // above 0
  // FAILED_PRECONDITION: it is over. DEADLINE_EXCEEDED: one before it was not called in time.
  // CANCELLED: the caller gave it up by options.stop. Calls options.poll_hook, as calls do.
  absl::Status Await(uint64_t turn, absl::Time deadline, const CallOptions& options);
  void Begin(uint64_t turn);
  // Waits while there is a Pause. The next Pause, or the end of the turn, stops what it gives.
  absl::StatusOr<std::stop_token> Try(uint64_t turn, absl::Time deadline,
                                      const CallOptions& options);
  absl::Status Check(uint64_t turn) const;  // FAILED_PRECONDITION: it is over
  void End(uint64_t turn);
  // With those behind it. Nothing happens where it is over.
  void GiveUp(uint64_t turn);

 private:
  struct Turn {
    bool has_begun = false;
    std::stop_source stop;  // of the present try
  };

  absl::Status WaitUntil(absl::FunctionRef<bool()> ready, absl::Time deadline,
                         const CallOptions& options);

  mutable absl::Mutex mutex_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  int pauses_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Turn> turns_ ABSL_GUARDED_BY(mutex_);  // those that are not over
};

}  // namespace attnd
