#include "server/rpc/call_watch.h"

#include <algorithm>

namespace attnd {

CallWatch::CallWatch(const TransferLimits& limits)
    : limits_(limits),
      looks_(std::min(limits.idle / 4, absl::Seconds(1)), [this] { Look(); }) {}

void CallWatch::Add(WatchedCall& call) {
  absl::MutexLock lock(&mutex_);
  calls_.insert(&call);
}

void CallWatch::Remove(WatchedCall& call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(&call);
}

void CallWatch::Look() {
  absl::MutexLock lock(&mutex_);
  for (WatchedCall* call : calls_) {
    const absl::Status status = call->progress()->Check(limits_);
    if (!status.ok()) call->Cut(status);
  }
}

}  // namespace attnd
