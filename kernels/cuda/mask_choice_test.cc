// Which tiles a masked forward visits, chosen by predicted time.
#include "kernels/cuda/mask_choice.h"

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/random_problem.h"
#include "attention/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/visit_cycles.h"
#include "tests/masks/small_masks.h"

namespace attnd::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A square block in `one_of` is shown, and those of the diagonal.
Problem Blocks(int64_t dim, uint32_t block, int one_of) {
  Problem p = PlainProblem(1, 1, 1024, dim);
  p.element = ElementType::kFloat16;
  BlockList blocks{.bq = block, .bk = block};
  uint32_t draw = 1;
  for (uint32_t row = 0; row < 1024 / block; ++row) {
    blocks.indptr.push_back(static_cast<uint32_t>(blocks.indices.size()));
    for (uint32_t key = 0; key < 1024 / block; ++key) {
      draw = draw * 1664525 + 1013904223;
      if (row == key || draw >> 16 < 65536u / one_of) blocks.indices.push_back(key);
    }
  }
  blocks.indptr.push_back(static_cast<uint32_t>(blocks.indices.size()));
  SetMask(std::move(blocks), p);
  return p;
}

std::string Chosen(const Problem& p, std::optional<MaskTiles> forced = std::nullopt, int gpu = 70) {
  MaskPlans plans;
  const auto kernels = ChooseForward(KernelRowsOfGpu(gpu), p, forced, plans);
  return kernels.ok() ? NameOf(kernels->forward) : std::string(kernels.status().message());
}

std::string ChosenBackward(const Problem& p, std::optional<MaskTiles> forced = std::nullopt,
                           int gpu = 70) {
  MaskPlans plans;
  const auto kernels = ChooseBackward(KernelRowsOfGpu(gpu), p, forced, plans);
  return kernels.ok() ? NameOf(kernels->backward) : std::string(kernels.status().message());
}

TEST(MaskChoice, TakesSmallTilesBackwardToo) {
  EXPECT_EQ(ChosenBackward(Blocks(32, 32, 40)), "backward_d32_f32_small");
  EXPECT_EQ(ChosenBackward(Blocks(64, 32, 40)), "backward_d64_f32_small");
  EXPECT_EQ(ChosenBackward(Blocks(64, 128, 20)), "backward_d64_f32_listed");
  EXPECT_EQ(ChosenBackward(Blocks(64, 32, 1)), "backward_d64_f32_listed");
  EXPECT_EQ(ChosenBackward(Blocks(128, 32, 40)), "backward_d128_f32_small");
  EXPECT_EQ(ChosenBackward(Blocks(256, 32, 40)), "backward_d256_f32_listed");
  EXPECT_EQ(ChosenBackward(Blocks(64, 32, 40), MaskTiles::kListed), "backward_d64_f32_listed");
  EXPECT_EQ(ChosenBackward(Blocks(32, 32, 1), MaskTiles::kSmall), "backward_d32_f32_small");
  EXPECT_THAT(ChosenBackward(Blocks(256, 32, 40), MaskTiles::kSmall),
              HasSubstr("no kernel of small tiles"));
}

// A head that sees little beside one that sees all: together and in shards they go one way, since
// sums are of a kernel's own tiles.
TEST(MaskChoice, GoesOneWayInAnyShard) {
  const Problem little = Blocks(32, 32, 40);
  Problem p = little;
  p.q_heads = p.kv_heads = 2;
  MaskSpec spec = little.mask->spec();
  spec.pattern.emplace_back(Window(-1, -1));
  spec.pattern_of = {0, 1};
  spec.extents = {};
  SetMask(spec, p);
  EXPECT_EQ(Chosen(SubProblem(p, {0, 1, 0, 1})), Chosen(p));
  EXPECT_EQ(Chosen(SubProblem(p, {0, 1, 1, 1})), Chosen(p));
  EXPECT_EQ(ChosenBackward(SubProblem(p, {0, 1, 0, 1})), ChosenBackward(p));
  EXPECT_EQ(ChosenBackward(SubProblem(p, {0, 1, 1, 1})), ChosenBackward(p));
}

TEST(MaskChoice, TakesSmallTilesWhereLargerOnesAreMostlyEmpty) {
  EXPECT_EQ(Chosen(Blocks(32, 32, 40)), "forward_d32_f32_small");
  EXPECT_EQ(Chosen(Blocks(64, 32, 20)), "forward_d64_f32_small");
  EXPECT_EQ(Chosen(Blocks(128, 32, 20)), "forward_d128_f32_small");
  EXPECT_EQ(Chosen(Blocks(64, 128, 20)), "forward_d64_f32_listed");
  EXPECT_EQ(Chosen(Blocks(64, 32, 1)), "forward_d64_f32_listed");
  Problem p = Blocks(64, 32, 20);
  p.dropout.threshold = 26;
  EXPECT_EQ(Chosen(p), "forward_d64_f32_small_dropout");
}

TEST(MaskChoice, StaysWithLargerTilesWhereThereAreNoSmallOnes) {
  EXPECT_EQ(Chosen(Blocks(256, 32, 20)), "forward_d256_f32_listed");
  EXPECT_EQ(Chosen(Blocks(256, 32, 20), std::nullopt, 80), "forward_d256_f32_listed");
  Problem p = Blocks(64, 32, 20);
  p.accumulate = AccumulateType::kFloat16;
  EXPECT_EQ(Chosen(p), "forward_d64_f16_listed");
  p.accumulate = AccumulateType::kFloat32;
  p.softcap = 30;
  EXPECT_EQ(Chosen(p), "forward_d64_f32_general");
  EXPECT_THAT(Chosen(p, MaskTiles::kSmall), HasSubstr("no kernel of small tiles"));
  p.softcap = 0;
  p.mask = nullptr;
  EXPECT_EQ(Chosen(p, MaskTiles::kSmall), "forward_d64_f32_linear");
}

TEST(MaskChoice, TakesSmallTilesOnNewerGpusToo) {
  for (int gpu : {80, 86, 90}) {
    SCOPED_TRACE(gpu);
    for (int64_t dim : {32, 64, 128}) {
      const std::string d = absl::StrCat("_d", dim, "_f32_");
      EXPECT_EQ(Chosen(Blocks(dim, 32, 20), std::nullopt, gpu), "forward" + d + "small");
      EXPECT_EQ(ChosenBackward(Blocks(dim, 32, 20), std::nullopt, gpu), "backward" + d + "small");
    }
    EXPECT_EQ(Chosen(Blocks(64, 32, 1), std::nullopt, gpu), "forward_d64_f32_listed");
    EXPECT_THAT(ChosenBackward(Blocks(128, 32, 1), std::nullopt, gpu),
                StartsWith("backward_d128_f32_listed"));
    Problem p = Blocks(64, 32, 20);
    p.element = ElementType::kBFloat16;
    p.dropout.threshold = 26;
    EXPECT_EQ(Chosen(p, std::nullopt, gpu), "forward_bf16_d64_f32_small_dropout");
  }
}

TEST(MaskChoice, CanBeForced) {
  EXPECT_EQ(Chosen(Blocks(64, 32, 1), MaskTiles::kSmall), "forward_d64_f32_small");
  EXPECT_EQ(Chosen(Blocks(64, 32, 20), MaskTiles::kListed), "forward_d64_f32_listed");
}

// The first plan already tells that nothing is gained, so that no second one is compiled.
TEST(MaskChoice, CompilesOnePlanWhereLargerTilesAreFull) {
  for (const bool is_full : {false, true}) {
    const Problem p = Blocks(64, is_full ? 128 : 32, 20);
    MaskPlans plans;
    ASSERT_TRUE(ChooseForward(KernelRowsOfGpu(70), p, std::nullopt, plans).ok());
    EXPECT_EQ(plans.stats().misses, is_full ? 1u : 2u);
  }
}

TEST(MaskChoice, PredictsFromWhatIsVisited) {
  const Problem p = Blocks(64, 32, 20);
  MaskPlans plans;
  for (const MaskTiles tiles : {MaskTiles::kListed, MaskTiles::kSmall}) {
    const auto kernels = SelectForward(KernelRowsOfGpu(70), p, tiles);
    ASSERT_TRUE(kernels.ok()) << kernels.status();
    const auto plan = plans.Get(p, OptionsOf(TilingOf(*kernels)));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const MaskPlan& of = (*plan)->plans()[0];
    const VisitCycles cycles = CyclesOf(kernels->forward);
    const double blocks = 1024.0 / kernels->forward.tile.q_rows;
    EXPECT_DOUBLE_EQ(PredictedCycles(kernels->forward, **plan, p),
                     static_cast<double>(of.full_tiles) * cycles.full +
                         static_cast<double>(of.partial_tiles) * cycles.partial +
                         blocks * cycles.block);
  }
}

}  // namespace
}  // namespace attnd::cuda
