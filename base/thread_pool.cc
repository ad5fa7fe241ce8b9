#include "base/thread_pool.h"

#include "base/check.h"

namespace attnd {

ThreadPool::ThreadPool(int threads) {
  CHECK(threads >= 1) << threads;
  for (int thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { WorkerMain(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t count,
                             const std::function<void(int64_t index, int thread)>& body) {
  absl::MutexLock one_caller(&caller_mutex_);
  Loop loop;
  loop.count = count;
  loop.body = &body;
  if (count > 1 && !workers_.empty()) {
    absl::MutexLock lock(&mutex_);
    loop_ = &loop;
    ++generation_;
  }
  TakeIndices(loop, /*thread=*/0);
  // No worker may enter once the caller has seen them all leave: `loop` lives on this stack.
  absl::MutexLock lock(&mutex_);
  loop_ = nullptr;
  mutex_.Await(absl::Condition(
      +[](Loop* l) { return l->running == 0; }, &loop));
}

void ThreadPool::TakeIndices(Loop& loop, int thread) {
  for (int64_t index; (index = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
    (*loop.body)(index, thread);
  }
}

void ThreadPool::WorkerMain(int thread) {
  uint64_t seen = 0;
  while (true) {
    Loop* loop = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      auto ready = [this, seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || (loop_ != nullptr && generation_ != seen);
      };
      mutex_.Await(absl::Condition(&ready));
      if (stopping_) return;
      loop = loop_;
      seen = generation_;
      ++loop->running;
    }
    TakeIndices(*loop, thread);
    absl::MutexLock lock(&mutex_);
    --loop->running;
  }
}

}  // namespace attnd
