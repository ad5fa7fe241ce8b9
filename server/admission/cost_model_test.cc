#include "server/admission/cost_model.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

constexpr Direction kForward = Direction::kForward;

Problem Of(ElementType element, int64_t head_dim = 64) {
  Problem p;
  p.element = element;
  p.qk_head_dim = p.v_head_dim = head_dim;
  return p;
}
const Problem kFloats = Of(ElementType::kFloat32);

TEST(CostModel, CountsLaunchWorkAndBytes) {
  CostModel cost(1e9);
  EXPECT_DOUBLE_EQ(cost.EstimateSeconds(kFloats, kForward, 0, 0), 50e-6);
  EXPECT_DOUBLE_EQ(cost.EstimateSeconds(kFloats, kForward, 2e9, 4e9), 50e-6 + 2 + 2);
}

TEST(CostModel, FollowsWhatLaunchesTook) {
  CostModel cost(1e9);
  cost.Learn(kFloats, kForward, 2e9, 1000, 1);
  for (int n = 0; n < 60; ++n) cost.Learn(kFloats, kForward, 5e9, 1000, 1);
  EXPECT_NEAR(cost.FlopsPerSecond(kFloats, kForward), 5e9, 5e7);
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(kFloats, Direction::kBackward), 1e9);
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(Of(ElementType::kFloat16), kForward), 1e9);
}

TEST(CostModel, KeepsARateForEachVariantAndTakesItsElementsForANewOne) {
  CostModel cost(1e9);
  Problem dropout = kFloats, causal = kFloats, softcap = kFloats;
  dropout.dropout.threshold = 10;
  causal.causal = true;
  softcap.softcap = 30;
  const Problem wide = Of(ElementType::kFloat32, 128);
  double rate = 2e9;
  for (const Problem& p : {kFloats, dropout, causal, softcap, wide}) {
    cost.Learn(p, kForward, rate, 1000, 1);
    rate += 1e9;
  }
  rate = 2e9;
  for (const Problem& p : {kFloats, dropout, causal, softcap, wide}) {
    EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(p, kForward), rate);
    rate += 1e9;
  }
  const double unseen = cost.FlopsPerSecond(Of(ElementType::kFloat32, 256), kForward);
  EXPECT_GT(unseen, 1e9);
  EXPECT_LT(unseen, 6e9);
}

TEST(CostModel, LearnsNothingFromLaunchesThatShowNoRate) {
  CostModel cost(1e9);
  cost.Learn(kFloats, kForward, 5e9, 1000, 100e-6);  // too short
  cost.Learn(kFloats, kForward, 1e6, 1 << 20, 1);    // bound by memory
  EXPECT_DOUBLE_EQ(cost.FlopsPerSecond(kFloats, kForward), 1e9);
}

TEST(CostModel, StaysFiniteWhenAnEngineGivesNoEstimate) {
  CostModel cost(0);
  EXPECT_LT(cost.EstimateSeconds(kFloats, kForward, 1e6, 0), 2);
}

TEST(CostModel, FollowsThePaceOfAQueue) {
  CostModel cost(1e9);
  EXPECT_DOUBLE_EQ(cost.pace(), 1);
  for (int n = 0; n < 200; ++n) {  // two end at once, then nothing for a while
    cost.Served(0.01, 0);
    cost.Served(0.01, 0.03);
  }
  EXPECT_NEAR(cost.pace(), 1.5, 0.05);
  for (int n = 0; n < 200; ++n) cost.Served(0.01, 0.005);
  EXPECT_NEAR(cost.pace(), 0.5, 0.15);
  for (int n = 0; n < 400; ++n) cost.Served(0.01, 0.005);
  EXPECT_NEAR(cost.pace(), 0.5, 0.01);
}

TEST(CostModel, BoundsThePace) {
  CostModel cost(1e9);
  cost.Served(0, 1000);
  EXPECT_DOUBLE_EQ(cost.pace(), 20);
  for (int n = 0; n < 1000; ++n) cost.Served(10, 1e-3);
  EXPECT_DOUBLE_EQ(cost.pace(), 0.05);
}

}  // namespace
}  // namespace attnd
