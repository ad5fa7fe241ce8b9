#include "server/cost_model.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

constexpr Direction kForward = Direction::kForward;
constexpr ElementType kFloat32 = ElementType::kFloat32;

TEST(CostModel, CountsLaunchWorkAndBytes) {
  CostModel cost(1e9);
  EXPECT_DOUBLE_EQ(cost.EstimateSeconds(kForward, kFloat32, 0, 0), 50e-6);
  EXPECT_DOUBLE_EQ(cost.EstimateSeconds(kForward, kFloat32, 2e9, 4e9), 50e-6 + 2 + 2);
}

TEST(CostModel, FollowsWhatLaunchesTook) {
  CostModel cost(1e9);
  for (int n = 0; n < 60; ++n) cost.Learn(kForward, kFloat32, 5e9, 1000, 1);
  EXPECT_NEAR(cost.FlopsPerSecond(kForward, kFloat32), 5e9, 5e7);
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(Direction::kBackward, kFloat32), 1e9);
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(kForward, ElementType::kFloat16), 1e9);
}

TEST(CostModel, LearnsNothingFromLaunchesThatShowNoRate) {
  CostModel cost(1e9);
  cost.Learn(kForward, kFloat32, 5e9, 1000, 100e-6);  // too short
  cost.Learn(kForward, kFloat32, 1e6, 1 << 20, 1);    // bound by memory
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(kForward, kFloat32), 1e9);
}

TEST(CostModel, StaysFiniteWhenAnEngineGivesNoEstimate) {
  CostModel cost(0);
  EXPECT_LT(cost.EstimateSeconds(kForward, kFloat32, 1e6, 0), 2);
}

}  // namespace
}  // namespace attnd
