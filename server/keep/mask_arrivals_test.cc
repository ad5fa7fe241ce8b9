#include "server/keep/mask_arrivals.h"

#include <gtest/gtest.h>

#include "server/call/status_details.h"

namespace attnd {
namespace {

TEST(MaskArrivals, ACallerAndAllCallersHaveTheirLimits) {
  MaskArrivals arrivals(/*max_bytes=*/100, /*caller_max_bytes=*/60);
  auto first = arrivals.Take("alice", 60);
  ASSERT_TRUE(first.ok());
  const absl::Status over_quota = arrivals.Take("alice", 1).status();
  EXPECT_EQ(over_quota.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(over_quota), reason::kTenantQuota);
  EXPECT_TRUE(RetryAfterOf(over_quota).has_value());
  {
    auto second = arrivals.Take("bob", 40);
    ASSERT_TRUE(second.ok());
    EXPECT_EQ(arrivals.bytes(), 100);
    const absl::Status full = arrivals.Take("carol", 1).status();
    EXPECT_EQ(full.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(ReasonOf(full), reason::kMemoryPressure);
  }
  EXPECT_TRUE(arrivals.Take("carol", 40).ok());
  first->reset();
  EXPECT_TRUE(arrivals.Take("alice", 60).ok());
  EXPECT_EQ(arrivals.bytes(), 0);
}

}  // namespace
}  // namespace attnd
