#include "base/free_ranges.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

TEST(FreeRanges, TakesTheSmallestGapThatIsLargeEnough) {
  FreeRanges ranges(1000);
  EXPECT_EQ(ranges.Take(300), 0);
  EXPECT_EQ(ranges.Take(100), 300);
  EXPECT_EQ(ranges.Take(100), 400);
  ranges.Give(0, 300);
  ranges.Give(400, 100);  // joins what follows: [400, 1000)
  EXPECT_EQ(ranges.Take(200), 0);
  EXPECT_EQ(ranges.Take(601), std::nullopt);
  EXPECT_EQ(ranges.Take(600), 400);
}

TEST(FreeRanges, IsWholeAgainWhenAllHasComeBackInAnyOrder) {
  FreeRanges ranges(300);
  for (int n = 0; n < 3; ++n) ASSERT_EQ(ranges.Take(100), n * 100);
  EXPECT_EQ(ranges.Take(1), std::nullopt);
  ranges.Give(100, 100);
  ranges.Give(0, 60);
  ranges.Give(60, 40);
  ranges.Give(200, 100);
  EXPECT_EQ(ranges.Take(300), 0);
}

}  // namespace
}  // namespace attnd
