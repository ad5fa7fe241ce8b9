// TaskQueue: threads that run tasks in the order in which they came, each once. A thread is started
// when a task finds none free, up to a limit. Nobody waits for a task here: the number of those
// that wait is bounded by whoever offers them. Threads: any.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class TaskQueue {
 public:
  explicit TaskQueue(int max_threads) : max_threads_(static_cast<size_t>(max_threads)) {}
  // Runs what is left, also what those tasks add, then joins.
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  void Run(std::function<void()> task);

 private:
  void Main();

  const size_t max_threads_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that wait for a task
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
