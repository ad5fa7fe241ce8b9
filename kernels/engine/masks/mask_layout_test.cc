// Lists of masks by description in device memory against their compiled plans, place by place.
#include "kernels/engine/masks/mask_layout.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/random_mask.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "kernels/emulator/block.h"
#include "kernels/rules/tile_lists.h"

namespace attnd::cuda {
namespace {

const MaskTiling kTilings[] = {
    {128, 32, false}, {64, 32, false}, {64, 128, true}, {64, 64, true}, {64, 32, true}};

bool InPlan(const MaskPlan& plan, bool by_keys, int row, int key) {
  const int own = by_keys ? key / plan.tile.keys : row / plan.tile.rows;
  const int other = by_keys ? row / plan.tile.rows : key / plan.tile.keys;
  for (const MaskTile& tile : (by_keys ? plan.by_keys : plan.by_rows).Line(own)) {
    if (static_cast<int>(tile.tile) != other) continue;
    if (tile.is_full()) return true;
    const int column = key % plan.tile.keys;
    const size_t word =
        static_cast<size_t>(row % plan.tile.rows * plan.words_per_row + column / 32);
    return plan.Bitmap(tile.bitmap)[word] >> (column % 32) & 1;
  }
  return false;
}

// How many places of one (b, h), looked up as a part's first, differ.
int Wrong(const TileLists& lists, const MaskPlan& plan) {
  std::vector<int> wrong(static_cast<size_t>(plan.rows));
  emulator::LaunchOptions options;
  options.grid = {static_cast<uint32_t>(plan.rows), 1, 1};
  auto report = emulator::Launch(options, [&](const emulator::Place& at) {
    if (at.thread != 0) return;
    const int row = static_cast<int>(at.block.x);
    MaskLookup lookup(lists, 0, 0);
    for (int key = 0; key < plan.keys; ++key) {
      wrong[row] += lookup.Shows(row, key) != InPlan(plan, lists.by_keys, row, key);
    }
  });
  EXPECT_TRUE(report.ok()) << report.status();
  int sum = 0;
  for (int count : wrong) sum += count;
  return sum;
}

TEST(MaskLayout, HoldsWhatThePlansSayForEveryTiling) {
  int several = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const RandomMaskCase c = RandomMask(
        [&random](int64_t low, int64_t high) { return random.Between(low, high); }, 300, 60000);
    auto mask = MaskDescription::Make(c.spec, c.call);
    ASSERT_TRUE(mask.ok()) << mask.status();
    Problem p;
    p.batch = c.call.batch;
    p.q_heads = c.call.q_heads;
    for (const MaskTiling& tiling : kTilings) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, ", tiles of ", tiling.rows, " × ", tiling.keys));
      auto compiled = CompiledMask::Make(**mask, c.spec.origin, c.call, OptionsOf(tiling));
      ASSERT_TRUE(compiled.ok()) << compiled.status();
      const MaskLayout layout = LayOutMask(*compiled, p, tiling);
      const std::vector<std::byte> image = MaskImage(*compiled, p, layout);
      ASSERT_EQ(static_cast<int64_t>(image.size()), layout.bytes);
      several += compiled->plans().size() > 1;
      const int64_t b = random.Between(0, p.batch - 1), h = random.Between(0, p.q_heads - 1);
      // MaskLine is aligned to 16 bytes, which a vector's memory is.
      const TileLists lists = ListsAt(layout, reinterpret_cast<uint64_t>(image.data()), b, h);
      EXPECT_EQ(Wrong(lists, compiled->PlanAt(b, h)), 0);
    }
  }
  EXPECT_GT(several, 20);
}

// A mask of N = 2^20: far below what its scores would take.
TEST(MaskLayout, OfAWindowOverAMillionKeysTakesAMegabyte) {
  const int64_t n = int64_t{1} << 20;
  const MaskCall call = {1, 1, n, n, {0}};
  const MaskExpr window = {.op = RelativeWindow{256, 0}, .of = {}};
  auto mask = MaskDescription::Make({.pattern = {window}, .pattern_of = {0}}, call);
  ASSERT_TRUE(mask.ok()) << mask.status();
  Problem p;
  p.batch = p.q_heads = 1;
  for (const MaskTiling& tiling : kTilings) {
    auto compiled = CompiledMask::Make(**mask, {}, call, OptionsOf(tiling));
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    EXPECT_LE(LayOutMask(*compiled, p, tiling).bytes, 5 << 18)
        << "tiles of " << tiling.rows << " × " << tiling.keys;
  }
}

}  // namespace
}  // namespace attnd::cuda
