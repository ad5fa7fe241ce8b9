// Compiler, canonical form and oracle agree on every score of random masks of every kind.
#include "attention/masks/random_mask.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "attention/masks/mask_comparison.h"
#include "attention/masks/mask_description.h"
#include "attention/random_problem.h"

namespace attnd {
namespace {

RandomMaskCase CaseOf(uint64_t seed, int64_t max_length, int64_t max_scores) {
  Random random(seed);
  return RandomMask([&](int64_t low, int64_t high) { return random.Between(low, high); },
                    max_length, max_scores);
}

const std::vector<MaskTileSize> kTiles = {{128, 32}, {16, 8}, {5, 37}};

TEST(RandomMask, IsCompiledAsTheOracleSeesItWhenItIsSmall) {
  for (uint64_t seed = 0; seed < 10000; ++seed) {
    const RandomMaskCase c = CaseOf(seed, seed % 4 == 0 ? 70 : 24, 3000);
    ASSERT_EQ(CompareWithOracle(c.spec, c.call, kTiles), "") << "seed " << seed;
  }
}

TEST(RandomMask, IsCompiledAsTheOracleSeesItUpTo300Keys) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const RandomMaskCase c = CaseOf(1000000 + seed, 300, 40000);
    ASSERT_EQ(CompareWithOracle(c.spec, c.call, kTiles), "") << "seed " << seed;
  }
}

// Otherwise the tests above would say less than they seem to.
TEST(RandomMask, HasEveryKindAndDensity) {
  std::set<size_t> patterns, operations;
  int64_t empty = 0, full = 0, mixed = 0, with_origin = 0, shared = 0, apart = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const RandomMaskCase c = CaseOf(seed, 24, 3000);
    with_origin += c.spec.origin.row_begin > 0;
    for (const MaskPattern& pattern : c.spec.pattern) {
      patterns.insert(pattern.index());
      if (auto* e = std::get_if<MaskExpr>(&pattern)) operations.insert(e->op.index());
    }
    auto mask = MaskDescription::Make(c.spec, c.call);
    ASSERT_TRUE(mask.ok()) << mask.status();
    auto compiled = CompiledMask::Make(**mask, c.spec.origin, c.call, {.tile = {16, 8}});
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const int64_t visible = compiled->PlanAt(0, 0).visible;
    ++(visible == 0 ? empty : visible == c.call.rows * c.call.keys ? full : mixed);
    const int64_t plans = static_cast<int64_t>(compiled->plans().size());
    ++(plans < c.call.batch * c.call.q_heads ? shared : apart);
  }
  EXPECT_EQ(patterns.size(), 7);
  EXPECT_EQ(operations.size(), 15);
  EXPECT_GT(empty, 50);
  EXPECT_GT(full, 50);
  EXPECT_GT(mixed, 1000);
  EXPECT_GT(with_origin, 300);
  EXPECT_GT(shared, 500);
  EXPECT_GT(apart, 100);
}

}  // namespace
}  // namespace attnd
