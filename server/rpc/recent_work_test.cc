#include "server/rpc/recent_work.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace attnd {
namespace {

TEST(RecentWork, TellsRatesThatCallsHaveHadAndForgetsThem) {
  FakeClock clock;
  RecentWork work(clock, 2);
  EXPECT_EQ(work.rates().calls, 0);
  for (int n = 0; n < 1000; ++n) {  // 100 s at 10 calls a second, a tenth of two devices
    clock.Advance(absl::Milliseconds(100));
    work.Answered(absl::Milliseconds(20));
  }
  EXPECT_NEAR(work.rates().calls, 10, 0.1);
  EXPECT_NEAR(work.rates().busy, 0.1, 0.001);
  const double before = work.rates().calls;
  clock.Advance(RecentWork::kMemory);
  EXPECT_NEAR(work.rates().calls, before / 2.718281828, 1e-6);
  EXPECT_NEAR(work.rates().calls / work.rates().busy, 10 / 0.1, 1);
  EXPECT_NEAR(work.busy_ratio(), 0.1 / 2.718281828, 1e-3);
  clock.Advance(10 * RecentWork::kMemory);
  EXPECT_EQ(work.busy_ratio(), 0);
  work.Answered(absl::Hours(1));
  EXPECT_EQ(work.busy_ratio(), 1);
}

}  // namespace
}  // namespace attnd
