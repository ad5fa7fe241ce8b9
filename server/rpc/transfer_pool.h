// TransferPool: a few threads that hand large replies to gRPC. The thread that does so also writes
// as much as the socket takes, milliseconds for a large tensor; a slot that did it itself would
// keep the engine waiting, and all connections would share the slots' few cores. Threads: any may
// call Run; what it is given runs once, on one of the pool's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

// A reply up to this is sent by the slot that computed it: a socket takes it at once.
inline constexpr int64_t kReplyBytesAtOnce = 256 << 10;

class TransferPool {
 public:
  explicit TransferPool(int threads);
  // Runs what is left, then joins.
  ~TransferPool();

  // The queue is bounded by admission: each entry is the reply of one admitted call.
  void Run(std::function<void()> send);

 private:
  void Main();

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnd
