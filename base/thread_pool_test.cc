#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>

namespace attnd {
namespace {

using Priority = ThreadPool::Priority;

TEST(ThreadPool, RunsEachIndexOnceWhateverTheThreadCount) {
  for (Priority priority : {Priority::kCallers, Priority::kBackground}) {
    for (int threads : {1, 2, 5}) {
      ThreadPool pool(threads, priority);
      for (int64_t count : {0, 1, 2, 7, 1000}) {
        std::vector<std::atomic<int>> hits(count);
        pool.ParallelFor(count, [&](int64_t index, int) { ++hits[index]; });
        for (int64_t i = 0; i < count; ++i) EXPECT_EQ(hits[i], 1) << i << " of " << count;
      }
    }
  }
}

TEST(ThreadPool, YieldsInTheBackground) {
  const auto nice = [] { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); };
  const int own = nice();
  ThreadPool pool(3, Priority::kBackground);
  std::atomic<int> others{0};
  pool.ParallelFor(100, [&](int64_t, int) { others += nice() > own || own == 19 ? 1 : 0; });
  EXPECT_EQ(others, 100);
  EXPECT_EQ(nice(), own);
}

TEST(ThreadPool, GivesAThreadNumberToOneCallAtATime) {
  ThreadPool pool(4, Priority::kBackground);
  std::vector<std::atomic<int>> busy(4);
  std::atomic<bool> overlap{false};
  pool.ParallelFor(2000, [&](int64_t, int thread) {
    if (busy[thread].fetch_add(1) != 0) overlap = true;
    busy[thread].fetch_sub(1);
  });
  EXPECT_FALSE(overlap);
}

TEST(ThreadPool, ServesManyCallersInTurn) {
  ThreadPool pool(3);
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) pool.ParallelFor(10, [&](int64_t, int) { ++sum; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 100 * 10);
}

}  // namespace
}  // namespace attnd
