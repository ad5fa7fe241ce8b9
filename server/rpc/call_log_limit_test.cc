#include "server/rpc/call_log_limit.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

TEST(CallLogLimit, LeavesLinesOutAboveItsLimitAndTellsHowMany) {
  CallLogLimit limit;
  absl::Time now = absl::UnixEpoch() + absl::Seconds(100);
  for (int64_t n = 0; n < CallLogLimit::kLinesPerSecond; ++n) {
    EXPECT_EQ(limit.Take(now), 0) << n;
  }
  EXPECT_EQ(limit.Take(now), std::nullopt);
  EXPECT_EQ(limit.Take(now + absl::Milliseconds(999)), std::nullopt);
  EXPECT_EQ(limit.Take(now + absl::Seconds(1)), 2);
  EXPECT_EQ(limit.Take(now + absl::Seconds(1)), 0);
}

TEST(CallLogLimit, CountsLinesOfLongerPeriods) {
  CallLogLimit limit(1, absl::Minutes(1));
  const absl::Time now = absl::UnixEpoch() + absl::Minutes(100);
  EXPECT_EQ(limit.Take(now), 0);
  EXPECT_EQ(limit.Take(now + absl::Seconds(59)), std::nullopt);
  EXPECT_EQ(limit.Take(now + absl::Seconds(60)), 1);
}

}  // namespace
}  // namespace attnd
