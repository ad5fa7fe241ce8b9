// WorkerPool: threads that help calls with many shards. They are started when first needed. A
// task that no thread is free for waits in a queue; callers never wait for a task to begin, so it
// must do nothing when it comes too late. Threads: any.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class WorkerPool {
 public:
  explicit WorkerPool(int max_threads) : max_threads_(max_threads) {}
  ~WorkerPool();  // waits for running tasks, drops queued ones
  void Offer(std::function<void()> task);

 private:
  void ThreadMain();

  const size_t max_threads_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
