// TransferPool: a few threads that copy large unary requests and hand large replies to gRPC. The
// thread that hands one over also writes as much as the socket takes, milliseconds for a large
// tensor; a slot that did so would keep the engine waiting, and a completion queue's thread that
// copied one would keep small calls waiting. Threads: any may call Run; what it is given runs once,
// on one of the pool's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

// A message up to this is moved by the thread that has it: a socket takes it at once.
inline constexpr int64_t kBytesAtOnce = 256 << 10;

class TransferPool {
 public:
  explicit TransferPool(int threads);
  // Runs what is left, then joins.
  ~TransferPool();

  // The queue is bounded: each entry is a call, of as many as connections may have open at a time.
  void Run(std::function<void()> send);

 private:
  void Main();

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attnd
