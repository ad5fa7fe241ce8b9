// ThreadPool: a fixed set of threads that runs the indices of one loop. Workers take indices in
// ascending order, so the longest work goes first when the caller sorts it so; nothing about the
// result may depend on who takes what. ParallelFor may be called from any thread, by one caller at
// a time (others wait their turn).
//
// Threads in the background yield to the process's other threads: of a processor that both want the
// system gives them a quarter, and others begin sooner (nice(2)). The caller is none of them and
// waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class ThreadPool {
 public:
  enum class Priority { kCallers, kBackground };
  // `threads` ≥ 1 counts the caller, which works too: a pool of one starts no thread. In the
  // background all are the pool's.
  explicit ThreadPool(int threads, Priority priority = Priority::kCallers);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(index, thread) for each index in [0, count) and returns when all have run. `thread`
  // is in [0, threads()) and at most one call at a time has a given value: it picks scratch memory.
  void ParallelFor(int64_t count, const std::function<void(int64_t index, int thread)>& body);

 private:
  struct Loop {
    int64_t count = 0;
    const std::function<void(int64_t, int)>* body = nullptr;
    std::atomic<int64_t> next{0};
    int running = 0;  // workers inside this loop; guarded by mutex_
  };
  void WorkerMain(int thread);
  static void TakeIndices(Loop& loop, int thread);

  const int threads_;
  const Priority priority_;
  absl::Mutex caller_mutex_;  // one ParallelFor at a time
  absl::Mutex mutex_;
  Loop* loop_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace attnd
