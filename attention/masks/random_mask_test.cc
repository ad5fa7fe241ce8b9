// Compiler, canonical form and oracle agree on every score of random masks of every kind.
#include "attention/masks/random_mask.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/masks/mask_comparison.h"
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

// Defects that a plan may have; `other` is the plan of another offset.
struct Planted {
  const char* name;
  std::function<void(MaskPlan& plan, const MaskPlan& other)> plant;
};

// Counts as full those tiles that `is_full` says, in both lists.
void FillTiles(
    MaskPlan& plan,
    const std::function<bool(int64_t row_tile, int64_t key_tile, const MaskTile& tile)>& is_full) {
  for (MaskLists* lists : {&plan.by_rows, &plan.by_keys}) {
    for (int64_t line = 0; line < lists->lines(); ++line) {
      for (uint32_t at = lists->offsets[line]; at < lists->offsets[line + 1]; ++at) {
        MaskTile& tile = lists->tiles[at];
        const bool by_rows = lists == &plan.by_rows;
        if (is_full(by_rows ? line : tile.tile, by_rows ? tile.tile : line, tile)) {
          tile.bitmap = kFullMaskTile;
        }
      }
    }
  }
}

// Whether each square of 8 × 8 scores of the tile shows something.
bool NoSquareIsEmpty(const MaskPlan& plan, const MaskTile& tile) {
  if (tile.is_full()) return true;
  const auto words = plan.Bitmap(tile.bitmap);
  for (int32_t row = 0; row < plan.tile.rows; row += 8) {
    for (int32_t key = 0; key < plan.tile.keys; key += 8) {
      uint32_t any = 0;
      for (int32_t r = row; r < row + 8; ++r) {
        any |= words[static_cast<size_t>(r * plan.words_per_row + key / 32)] >> key % 32 & 0xff;
      }
      if (any == 0) return false;
    }
  }
  return true;
}

const std::vector<Planted>& Mistakes() {
  static const auto* mistakes = new std::vector<Planted>{
      {"the plan of another offset", [](MaskPlan& p, const MaskPlan& other) { p = other; }},
      {"the transpose of another offset",
       [](MaskPlan& p, const MaskPlan& other) { p.by_keys = other.by_keys; }},
      {"the transpose lists rows", [](MaskPlan& p, const MaskPlan&) { p.by_keys = p.by_rows; }},
      {"full where no square of 8 x 8 is empty",
       [](MaskPlan& p, const MaskPlan&) {
         FillTiles(p, [&p](int64_t, int64_t, const MaskTile& t) { return NoSquareIsEmpty(p, t); });
       }},
      {"the last tiles of rows, which reach over the end, are full",
       [](MaskPlan& p, const MaskPlan&) {
         FillTiles(p, [&p](int64_t row, int64_t, const MaskTile&) {
           return row == p.rows / p.tile.rows;
         });
       }},
      {"the last tiles of keys, which reach over the end, are full",
       [](MaskPlan& p, const MaskPlan&) {
         FillTiles(p, [&p](int64_t, int64_t key, const MaskTile&) {
           return key == p.keys / p.tile.keys;
         });
       }},
  };
  return *mistakes;
}

TEST(MaskComparison, NoticesEachPlantedMistake) {
  const MaskExpr stride = {StrideRel{5, 2}, {}}, window = {RelativeWindow{70, 3}, {}};
  MaskSpec spec;
  spec.pattern = {MaskExpr{AnyOf{}, {stride, window}}};
  spec.pattern_of = {0};
  const MaskCall call = {1, 1, 170, 190, {20}}, moved = {1, 1, 170, 190, {60}};
  const auto plan_of = [&spec](const MaskCall& at) {
    auto mask = MaskDescription::Make(spec, at);
    EXPECT_TRUE(mask.ok()) << mask.status();
    return CompiledMask::Make(**mask, {}, at, {.tile = {64, 32}, .row_keys = true})->PlanAt(0, 0);
  };
  const MaskPlan right = plan_of(call), other = plan_of(moved);
  ASSERT_EQ(ComparePlanWithOracle(spec, call, 0, 0, right), "");
  ASSERT_LE(other.bitmap_count(), right.bitmap_count());  // so that its lists fit
  for (const Planted& mistake : Mistakes()) {
    MaskPlan plan = right;
    mistake.plant(plan, other);
    EXPECT_NE(ComparePlanWithOracle(spec, call, 0, 0, plan), "") << mistake.name;
  }
}

// Otherwise the random tests would say less than they seem to.
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
