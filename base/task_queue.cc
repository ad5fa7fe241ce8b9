#include "base/task_queue.h"

#include <utility>

namespace attnd {

TaskQueue::~TaskQueue() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

// A thread counts as idle from its start on, so that the next task sees that one is free already.
void TaskQueue::Run(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  if (stopping_ || tasks_.size() <= idle_ || threads_.size() == max_threads_) return;
  ++idle_;
  threads_.emplace_back([this] { Main(); });
}

void TaskQueue::Main() {
  auto woken = [this]()
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !tasks_.empty(); };
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&woken));
      if (tasks_.empty()) return;
      --idle_;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    task = nullptr;  // whatever it holds goes before the thread counts as free
    absl::MutexLock lock(&mutex_);
    ++idle_;
  }
}

}  // namespace attnd
