// CallState: what the workers of one logical call share: which shards are to be sent, which have
// failed and wait, what the call has come to so far, and how to stop it. CallRunner's workers take
// shards from it and report back. Pure but for its Clock.
//
// Invariant: each unfinished shard is ready, delayed, or in the hands of exactly one worker, and at
// most `max_in_hand_` are.
// Threads: any.
#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/steady_cond_var.h"
#include "client/shards/receipt_merger.h"
#include "client/types/call_options.h"
#include "client/types/call_receipt.h"

namespace attnd {

class CallState {
 public:
  CallState(std::vector<int64_t> shards, Progress progress,
            std::function<void(const Progress&)> on_progress, const Clock& clock);

  // The next shard to send, if one is due.
  std::optional<int64_t> TakeReady();
  // When the first delayed shard is due; infinite future without one.
  absl::Time NextDue();
  // Waits until a shard may be taken, at most until `until`; false at once when there is nothing
  // left to take, and when the call ends meanwhile.
  bool WaitUntilDue(absl::Time until);

  void Delay(int64_t shard, absl::Duration delay);
  // A server takes fewer of the call's shards at a time than it has been sent: this one goes last,
  // and from now on no more are under way than the others are. False when there are no others.
  bool Narrow(int64_t shard);
  void Done(const ShardReceipt& receipt, int64_t bytes_received);
  // The first failure is the call's; running RPCs are cancelled, waiting shards dropped.
  void Fail(absl::Status status);
  bool failed();

  // An RPC that Fail cancels; false when the call has failed already.
  bool Register(grpc::ClientContext* context);
  void Unregister(grpc::ClientContext* context);

  void CountSent(int64_t bytes, int64_t copied);
  void CountRetry();
  void CountLeased();
  void CountShared();
  int64_t shards_done();
  // Once, when no worker has a shard.
  absl::StatusOr<CallReceipt> Result();

 private:
  void PromoteDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayTake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !ready_.empty() && in_hand_ < max_in_hand_;
  }

  const Clock& clock_;
  const std::function<void(const Progress&)> on_progress_;
  absl::Mutex progress_mutex_;  // taken before mutex_: one callback at a time, in order
  absl::Mutex mutex_;
  SteadyCondVar changed_;  // what WaitUntilDue waits for
  std::deque<int64_t> ready_ ABSL_GUARDED_BY(mutex_);
  std::multimap<absl::Time, int64_t> delayed_ ABSL_GUARDED_BY(mutex_);
  int64_t in_hand_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t max_in_hand_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;
  std::set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  Progress progress_ ABSL_GUARDED_BY(mutex_);
  ReceiptMerger receipt_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
