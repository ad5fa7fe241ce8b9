#include "base/task_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"

namespace attnd {
namespace {

TEST(TaskQueue, RunsEachTaskOnceEvenThoseLeftAtTheEnd) {
  std::atomic<int> runs[100] = {};
  {
    TaskQueue queue(3);
    for (auto& count : runs) queue.Run([&count] { ++count; });
  }
  for (auto& count : runs) EXPECT_EQ(count, 1);
}

TEST(TaskQueue, KeepsTheOrder) {
  std::string order;
  {
    TaskQueue queue(1);
    for (char name : {'a', 'b', 'c', 'd'}) queue.Run([&order, name] { order += name; });
  }
  EXPECT_EQ(order, "abcd");
}

TEST(TaskQueue, StartsAsManyThreadsAsTasksNeedUpToTheLimit) {
  absl::Barrier* all_run = new absl::Barrier(3);  // the last to leave deletes it
  std::atomic<bool> fourth{false};
  absl::Notification release;
  {
    TaskQueue queue(3);
    for (int n = 0; n < 3; ++n) {
      queue.Run([&, all_run] {
        if (all_run->Block()) {
          delete all_run;
          release.Notify();
        }
        release.WaitForNotification();
      });
    }
    queue.Run([&] {
      EXPECT_TRUE(release.HasBeenNotified());  // it waited for one of the three threads
      fourth = true;
    });
  }
  EXPECT_TRUE(fourth);
}

TEST(TaskQueue, RunsWhatTasksAddWhileItEnds) {
  absl::Notification ends;
  int runs = 0;
  {
    TaskQueue queue(2);
    queue.Run([&] {
      ends.WaitForNotification();
      queue.Run([&] { queue.Run([&] { ++runs; }); });
    });
    ends.Notify();
  }
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace attnd
