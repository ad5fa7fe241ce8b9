// CallWatch: cuts calls whose peer neither sends nor reads (TransferProgress), so that none holds
// memory for nothing: unary and streamed calls, from the first byte to the last.
// Threads: any may add and remove; one of its own checks all calls several times within `idle`.
#pragma once

#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/periodic.h"
#include "server/call/transfer_progress.h"

namespace attnd {

class WatchedCall {
 public:
  explicit WatchedCall(const Clock& clock) : progress_(std::make_shared<TransferProgress>(clock)) {}
  virtual ~WatchedCall() = default;
  // Shared with the slices of a reply, which gRPC may hold for longer than the call.
  const std::shared_ptr<TransferProgress>& progress() { return progress_; }
  // From the watch's thread, at each look while the call is over a limit. Must not call back into
  // the watch.
  virtual void Cut(const absl::Status& status) = 0;

 private:
  const std::shared_ptr<TransferProgress> progress_;
};

class CallWatch {
 public:
  explicit CallWatch(const TransferLimits& limits);

  void Add(WatchedCall& call);
  // When it returns the watch holds the call no more.
  void Remove(WatchedCall& call);

 private:
  void Look();

  const TransferLimits limits_;
  absl::Mutex mutex_;
  std::set<WatchedCall*> calls_ ABSL_GUARDED_BY(mutex_);
  Periodic looks_;
};

}  // namespace attnd
