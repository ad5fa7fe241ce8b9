// How rows are batched, how a call is cut and what is kept may not change a bit, with rounding and
// without.
#include <gtest/gtest.h>

#include <algorithm>

#include "modules/check_rows.h"
#include "modules/reference/call_parts.h"
#include "tests/layers/reference_fixture.h"

namespace attnd {
namespace {

constexpr Rounding kRoundings[] = {Rounding::kExact, Rounding::kElements};
constexpr ElementType kElements[] = {ElementType::kFloat16, ElementType::kBFloat16,
                                     ElementType::kFloat32};

using Results = ReferenceFixture::Results;

ReferenceFixture RandomFixture(uint64_t seed, Rounding rounding) {
  Random random(seed);
  return {RandomLayout(random, {.element = kElements[seed % 3]}), seed, rounding};
}

TEST(ModuleInvariance, ComputingAgainGivesTheBitsThatWereKept) {
  for (Rounding rounding : kRoundings) {
    for (uint64_t seed = 0; seed < 150; ++seed) {
      const ReferenceFixture fixture = RandomFixture(seed, rounding);
      const Results kept = fixture.Run(Recompute::kNone);
      EXPECT_TRUE(kept.HasBitsOf(fixture.Run(Recompute::kPointwise))) << "seed " << seed;
      EXPECT_TRUE(kept.HasBitsOf(fixture.Run(Recompute::kLayers))) << "seed " << seed;
    }
  }
}

TEST(ModuleInvariance, SequencesAloneGiveTheBitsThatTheyHaveInABatch) {
  int compared = 0;
  for (Rounding rounding : kRoundings) {
    for (uint64_t seed = 0; seed < 300; ++seed) {
      const ReferenceFixture fixture = RandomFixture(seed, rounding);
      const ModuleLayout& layout = fixture.graph().layout();
      const CallRows& rows = fixture.inputs.rows;
      if (rows.is_packed() || rows.batch == 1 || DependsOnBatch(layout)) continue;
      ++compared;
      const Results whole = fixture.Run();
      Results joined;
      std::vector<Numbers> gradients = fixture.EmptyGradients();
      for (int64_t b = 0; b < rows.batch; ++b) {
        const Numbers dy = Part(fixture.dy, layout.width, b * rows.length, rows.length);
        const Results one =
            fixture.Run(OneSequence(fixture.inputs, layout, b), dy, Recompute::kNone, gradients);
        gradients = one.gradients;
        Append(one.y, joined.y);
        Append(one.dx, joined.dx);
        Append(one.d_memory, joined.d_memory);
      }
      EXPECT_TRUE(SameBits(whole.y, joined.y)) << "seed " << seed;
      EXPECT_TRUE(SameBits(whole.dx, joined.dx)) << "seed " << seed;
      EXPECT_TRUE(SameBits(whole.d_memory, joined.d_memory)) << "seed " << seed;
      // Row after row in float64; with rounding, blocks of 1024 rows begin with each call.
      if (rounding == Rounding::kExact) {
        EXPECT_TRUE(SameBits(whole.gradients, gradients)) << seed;
      }
    }
  }
  EXPECT_GT(compared, 100);
}

// One linear and a norm, wide enough to have every kind of parameter, small enough for many rows.
ModuleLayout LongLayout() {
  ModuleLayout layout{.width = 8, .element = ElementType::kBFloat16};
  layout.blocks = {
      {.parameters = {{"norm", {8}}, {"w", {8, 8}}, {"b", {8}}},
       .ops = {{NormOp{.input = 0, .kind = NormKind::kRms, .epsilon = 1e-3f, .weight = 0}},
               {LinearOp{.input = 2, .weight = 1, .bias = 2}},
               {DropoutOp{.input = 3, .threshold = 40}},
               {BinaryOp{.kind = BinaryKind::kAdd, .a = 0, .b = 4}}}}};
  layout.layers = {{.prefix = "0."}, {.prefix = "1."}};
  return layout;
}

TEST(ModuleInvariance, OneCallGivesTheBitsOfItsMicroBatches) {
  ReferenceFixture fixture(LongLayout(), 3, Rounding::kElements);
  fixture.SetRows({.batch = 8, .length = 512});
  const Results whole = fixture.Run();
  Numbers y, dx;
  std::vector<Numbers> gradients = fixture.EmptyGradients();
  for (int64_t first = 0; first < 8; first += 2) {  // four of 1024 rows
    ModuleInputs part = fixture.inputs;
    part.rows = {.batch = 2, .length = 512, .first_row = first * 512, .first_sequence = first};
    part.x = Part(fixture.inputs.x, 8, first * 512, 1024);
    const Results one =
        fixture.Run(part, Part(fixture.dy, 8, first * 512, 1024), Recompute::kNone, gradients);
    gradients = one.gradients;
    Append(one.y, y);
    Append(one.dx, dx);
  }
  EXPECT_TRUE(SameBits(whole.y, y));
  EXPECT_TRUE(SameBits(whole.dx, dx));
  EXPECT_TRUE(SameBits(whole.gradients, gradients));
}

TEST(ModuleInvariance, BlocksOfRowsAreRoundedAndOthersAreOtherBits) {
  // The same rows cut at 512 are other sums: the promise is for multiples of 1024 alone, and the
  // test above can fail.
  ReferenceFixture fixture(LongLayout(), 3, Rounding::kElements);
  fixture.SetRows({.batch = 2, .length = 512});
  std::vector<Numbers> gradients = fixture.EmptyGradients();
  for (int64_t first = 0; first < 2; ++first) {
    ModuleInputs part = fixture.inputs;
    part.rows = {.batch = 1, .length = 512, .first_row = first * 512, .first_sequence = first};
    part.x = Part(fixture.inputs.x, 8, first * 512, 512);
    gradients =
        fixture.Run(part, Part(fixture.dy, 8, first * 512, 512), Recompute::kNone, gradients)
            .gradients;
  }
  EXPECT_FALSE(SameBits(fixture.Run().gradients, gradients));
}

TEST(ModuleInvariance, PackedSequencesGiveTheBitsOfDenseOnes) {
  int compared = 0;
  for (Rounding rounding : kRoundings) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const ReferenceFixture fixture = RandomFixture(seed, rounding);
      ModuleInputs packed = fixture.inputs;
      CallRows& rows = packed.rows;
      if (rows.is_packed() || !rows.kv_lengths.empty() || !rows.memory_kv_lengths.empty()) continue;
      for (int64_t b = 0; b <= rows.batch; ++b) {
        rows.cu_seqlens.push_back(static_cast<int32_t>(b * rows.length));
        if (rows.memory_length == 0) continue;
        rows.memory_cu_seqlens.push_back(static_cast<int32_t>(b * rows.memory_length));
      }
      rows.length = rows.memory_length = 0;
      ASSERT_TRUE(CheckRows(fixture.graph(), rows).ok()) << "seed " << seed;
      EXPECT_TRUE(fixture.Run().HasBitsOf(
          fixture.Run(packed, fixture.dy, Recompute::kNone, fixture.EmptyGradients())))
          << "seed " << seed;
      ++compared;
    }
  }
  EXPECT_GT(compared, 100);
}

TEST(ModuleInvariance, RoundedResultsAreCloseToExactOnes) {
  int differ = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const ModuleLayout layout = RandomLayout(random, {.max_layers = 1});
    const ReferenceFixture rounded(layout, seed, Rounding::kElements);
    ReferenceFixture exact(layout, seed, Rounding::kExact);
    exact.weights = rounded.weights;
    exact.inputs = rounded.inputs;
    exact.dy = rounded.dy;
    const Results a = rounded.Run(), b = exact.Run();
    double most = 0, off = 0;
    for (size_t n = 0; n < a.y.size(); ++n) {
      most = std::max(most, std::fabs(b.y[n]));
      off = std::max(off, std::fabs(a.y[n] - b.y[n]));
    }
    EXPECT_LE(off, 1e-4 * (1 + most)) << "seed " << seed;
    differ += off > 0;
  }
  EXPECT_GT(differ, 80);
}

}  // namespace
}  // namespace attnd
