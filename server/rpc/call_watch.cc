#include "server/rpc/call_watch.h"

#include <algorithm>

namespace attnd {

CallWatch::CallWatch(const TransferLimits& limits) : limits_(limits), thread_([this] { Main(); }) {}

CallWatch::~CallWatch() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    stop_.Signal();
  }
  thread_.join();
}

void CallWatch::Add(WatchedCall& call) {
  absl::MutexLock lock(&mutex_);
  calls_.insert(&call);
}

void CallWatch::Remove(WatchedCall& call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(&call);
}

void CallWatch::Main() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    stop_.WaitWithTimeout(&mutex_, std::min(limits_.idle / 4, absl::Seconds(1)));
    for (WatchedCall* call : calls_) {
      const absl::Status status = call->progress()->Check(limits_);
      if (!status.ok()) call->Cut(status);
    }
  }
}

}  // namespace attnd
