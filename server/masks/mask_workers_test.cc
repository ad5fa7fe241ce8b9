#include "server/masks/mask_workers.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/notification.h"

namespace attnd {
namespace {

TEST(MaskWorkers, RunsEverythingOnceBeforeItEnds) {
  std::atomic<int> runs{0};
  {
    MaskWorkers workers(2);
    for (int n = 0; n < 100; ++n) {
      workers.Run(n % 3 == 0 ? "ann" : "bob", [&] { ++runs; });
    }
  }
  EXPECT_EQ(runs, 100);
}

TEST(MaskWorkers, OneCallersSlowWorkDelaysNobodyElse) {
  absl::Notification release, done;
  MaskWorkers workers(2);
  std::atomic<int> slow{0};
  for (int n = 0; n < 10; ++n) {
    workers.Run("ann", [&] {
      ++slow;
      release.WaitForNotification();
    });
  }
  workers.Run("bob", [&] { done.Notify(); });
  done.WaitForNotification();  // though ann would have filled both threads
  EXPECT_LE(slow, 1);
  release.Notify();
}

TEST(MaskWorkers, CallersTakeTurns) {
  absl::Notification all_wait;
  std::string order;
  {
    MaskWorkers workers(1);
    workers.Run("first", [&] { all_wait.WaitForNotification(); });
    for (const char* caller : {"a", "a", "a", "b", "b", "c"}) {
      workers.Run(caller, [&order, caller] { order += caller; });
    }
    all_wait.Notify();
  }
  EXPECT_EQ(order, "abcaba");
}

}  // namespace
}  // namespace attnd
