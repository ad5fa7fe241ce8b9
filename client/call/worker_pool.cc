#include "client/call/worker_pool.h"

#include <utility>

namespace attnd {

WorkerPool::~WorkerPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    queue_.clear();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void WorkerPool::Offer(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(task));
  if (queue_.size() > idle_ && threads_.size() < max_threads_) {
    threads_.emplace_back([this] { ThreadMain(); });
  }
}

void WorkerPool::ThreadMain() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      ++idle_;
      auto woken = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !queue_.empty();
      };
      mutex_.Await(absl::Condition(&woken));
      --idle_;
      if (stopping_) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task();
  }
}

}  // namespace attnd
