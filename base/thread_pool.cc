#include "base/thread_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"

namespace attnd {
namespace {

// A third of another thread's weight (sched(7)).
constexpr int kBackgroundNice = 5;

}  // namespace

ThreadPool::ThreadPool(int threads, Priority priority) : threads_(threads), priority_(priority) {
  CHECK(threads >= 1) << threads;
  for (int thread = priority == Priority::kBackground ? 0 : 1; thread < threads; ++thread) {
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
  const bool is_shared = count > 1 && !workers_.empty();
  if (is_shared) {
    absl::MutexLock lock(&mutex_);
    loop_ = &loop;
    ++generation_;
  }
  if (!is_shared || priority_ != Priority::kBackground) TakeIndices(loop, /*thread=*/0);
  // No worker may enter once the caller has seen them all leave: `loop` lives on this stack.
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](Loop* l) { return l->next >= l->count && l->running == 0; }, &loop));
  loop_ = nullptr;
}

void ThreadPool::TakeIndices(Loop& loop, int thread) {
  for (int64_t index; (index = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
    (*loop.body)(index, thread);
  }
}

void ThreadPool::WorkerMain(int thread) {
  if (priority_ == Priority::kBackground) {
    const auto own = static_cast<id_t>(gettid());  // Linux counts threads as processes here
    setpriority(PRIO_PROCESS, own, getpriority(PRIO_PROCESS, own) + kBackgroundNice);
  }
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
