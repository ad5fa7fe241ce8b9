#include "server/rpc/mask_workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "absl/synchronization/notification.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

TEST(MaskWorkers, RunsEverythingOnceBeforeItEnds) {
  std::atomic<int> runs{0};
  {
    MaskWorkers workers(2, 100);
    for (int n = 0; n < 100; ++n) {
      EXPECT_TRUE(workers.Run(n % 3 == 0 ? "ann" : "bob", [&] { ++runs; }).ok());
    }
  }
  EXPECT_EQ(runs, 100);
}

TEST(MaskWorkers, OneCallersSlowWorkDelaysNobodyElse) {
  absl::Notification release, done;
  MaskWorkers workers(2, 100);
  std::atomic<int> slow{0};
  for (int n = 0; n < 10; ++n) {
    EXPECT_TRUE(workers
                    .Run("ann",
                         [&] {
                           ++slow;
                           release.WaitForNotification();
                         })
                    .ok());
  }
  EXPECT_TRUE(workers.Run("bob", [&] { done.Notify(); }).ok());
  done.WaitForNotification();  // though ann would have filled both threads
  EXPECT_LE(slow, 1);
  release.Notify();
}

TEST(MaskWorkers, CallersTakeTurns) {
  absl::Notification all_wait;
  std::string order;
  {
    MaskWorkers workers(1, 100);
    EXPECT_TRUE(workers.Run("first", [&] { all_wait.WaitForNotification(); }).ok());
    for (const char* caller : {"a", "a", "a", "b", "b", "c"}) {
      EXPECT_TRUE(workers.Run(caller, [&order, caller] { order += caller; }).ok());
    }
    all_wait.Notify();
  }
  EXPECT_EQ(order, "abcaba");
}

TEST(MaskWorkers, ACallersQuotaIsItsOwn) {
  absl::Notification started, release;
  std::atomic<int> runs{0};
  const auto count = [&runs] { ++runs; };
  {
    MaskWorkers workers(1, 2);
    ASSERT_TRUE(workers
                    .Run("ann",
                         [&] {
                           started.Notify();
                           release.WaitForNotification();
                         })
                    .ok());
    started.WaitForNotification();
    EXPECT_TRUE(workers.Run("ann", count).ok());
    EXPECT_TRUE(workers.Run("ann", count).ok());
    const absl::Status third = workers.Run("ann", count);
    EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted) << third;
    EXPECT_EQ(ReasonOf(third), reason::kTenantQuota);
    EXPECT_TRUE(RetryAfterOf(third).has_value());
    EXPECT_TRUE(workers.Run("bob", count).ok());
    EXPECT_EQ(workers.waiting(), 3);
    release.Notify();
  }
  EXPECT_EQ(runs, 3);
}

}  // namespace
}  // namespace attnd
