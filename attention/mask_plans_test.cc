#include "attention/mask_plans.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "attention/problem.h"
#include "attention/random_problem.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

Problem WithMask(MaskExpr expr, int64_t length = 256, EmptyRow empty = EmptyRow::kZero) {
  Problem p = PlainProblem(2, 2, length, 64);
  SetMask({.pattern = {std::move(expr)}, .pattern_of = {0}, .empty_row = empty}, p);
  return p;
}

TEST(MaskPlans, CallsThatAgreeShareAPlan) {
  MaskPlans plans;
  const Problem p = WithMask(Window(7, 0));
  auto first = plans.Get(p, HostMaskOptions());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*first, *plans.Get(WithMask(Window(7, 0)), HostMaskOptions()));
  EXPECT_NE(*first, *plans.Get(WithMask(Window(8, 0)), HostMaskOptions()));
  EXPECT_NE(*first, *plans.Get(WithMask(Window(7, 0), 320), HostMaskOptions()));
  Problem moved = p;
  moved.alignment = Alignment::kOffsets;
  moved.offsets = {5};
  EXPECT_NE(*first, *plans.Get(moved, HostMaskOptions()));
  EXPECT_EQ(plans.stats().hits, 1u);
  EXPECT_EQ(plans.stats().misses, 4u);
}

TEST(MaskPlans, ThoseUsedLastStay) {
  const Problem first = WithMask(Window(1, 0));
  MaskPlans measured;
  ASSERT_TRUE(measured.Get(first, HostMaskOptions()).ok());
  const int64_t one = measured.stats().bytes;
  MaskPlans plans(3 * one + one / 2);
  for (int32_t left = 1; left <= 20; ++left) {
    ASSERT_TRUE(plans.Get(WithMask(Window(left, 0)), HostMaskOptions()).ok());
    ASSERT_TRUE(plans.Get(first, HostMaskOptions()).ok());
    EXPECT_LE(plans.stats().bytes, 4 * one);
  }
  EXPECT_EQ(plans.stats().hits, 20u);  // the first one each time
}

TEST(MaskPlans, OneCompilesForAllThatAsk) {
  MaskPlans plans;
  const Problem p = WithMask(Window(300, 0), 8192);
  std::vector<const CompiledMask*> got(4);
  std::vector<std::thread> threads;
  for (auto& plan : got) {
    threads.emplace_back([&] { plan = plans.Get(p, HostMaskOptions())->get(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const CompiledMask* plan : got) EXPECT_EQ(plan, got[0]);
  EXPECT_EQ(plans.stats().misses, 1u);
}

TEST(MaskPlans, SaysWhatShareIsVisited) {
  MaskPlans plans;
  const Problem p = WithMask(Window(-1, 0));  // causal: 10 of 16 tiles
  EXPECT_DOUBLE_EQ(VisitedShare(**plans.Get(p, HostMaskOptions()), p), 10.0 / 16);
}

TEST(MaskPlans, NamesTheFirstRowThatSeesNothing) {
  MaskPlans plans;
  Problem p = WithMask({.op = Global{{0}, {4}, GlobalDirection::kColumns}, .of = {}});
  EXPECT_TRUE(CheckEmptyRows(**plans.Get(p, HostMaskOptions()), p).ok());
  p.window_left = 9;
  p.window_right = 0;
  absl::Status status = CheckEmptyRows(**plans.Get(p, HostMaskOptions()), p);
  EXPECT_EQ(status.message(),
            "problem.mask.empty_row: expected a visible key for every row, got none for row 13 of "
            "head 0 of batch entry 0");
}

TEST(MaskPlans, FindsWithoutCompiling) {
  MaskPlans plans;
  const Problem p = WithMask(Window(7, 0));
  EXPECT_EQ(plans.Find(p, HostMaskOptions()), nullptr);
  EXPECT_EQ(plans.stats().misses, 0u);
  auto plan = plans.Get(p, HostMaskOptions());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plans.Find(p, HostMaskOptions()), *plan);
}

TEST(MaskPlans, APlanThatSomebodyHoldsIsFoundThoughThereIsNoRoom) {
  MaskPlans plans(100);
  const Problem p = WithMask(Window(7, 0));
  auto held = plans.Get(p, HostMaskOptions());
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(plans.stats().bytes, 0);
  EXPECT_EQ(plans.Find(p, HostMaskOptions()), *held);
  EXPECT_EQ(*plans.Get(p, HostMaskOptions()), *held);
  EXPECT_EQ(plans.stats().misses, 1u);
  *held = nullptr;
  EXPECT_EQ(plans.Find(p, HostMaskOptions()), nullptr);
}

TEST(MaskPlans, CountsWhatAMaskShows) {
  MaskPlans plans;
  const Problem p = WithMask({.op = Global{{0}, {65}, GlobalDirection::kRows}, .of = {}});
  const MaskTotals totals = TotalsOf(**plans.Get(p, HostMaskOptions()), p);
  EXPECT_EQ(totals.visible, 4 * 65 * 256);  // 2 batch entries of 2 heads
  EXPECT_EQ(totals.empty_rows, 4 * (256 - 65));
  EXPECT_EQ(totals.tiles, 4 * 16);
  EXPECT_EQ(totals.tiles_full, 4 * 4);
  EXPECT_EQ(totals.tiles_partial, 4 * 4);
  EXPECT_EQ(totals.distinct_bitmaps, 1);
}

TEST(MaskPlans, RefusesToLookThroughTooManyRows) {
  Problem p = WithMask(Window(-1, 0), 1024, EmptyRow::kReject);
  MaskPlans plans;
  EXPECT_TRUE(CheckEmptyRows(**plans.Get(p, HostMaskOptions()), p).ok());
  p.batch = 1 << 18;
  const absl::Status status = CheckEmptyRows(**plans.Get(p, HostMaskOptions()), p);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message().rfind("problem.mask.empty_row: expected at most ", 0), 0) << status;
}

}  // namespace
}  // namespace attnd
