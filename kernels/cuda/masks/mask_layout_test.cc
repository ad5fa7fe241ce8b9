// Lists of masks by description in device memory against their compiled plans, place by place.
#include "kernels/cuda/masks/mask_layout.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/random_mask.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "tests/emulator/block.h"
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
  const bool by_keys = !plan.by_keys.offsets.empty();
  std::vector<int> wrong(static_cast<size_t>(plan.rows));
  emulator::LaunchOptions options;
  options.grid = {static_cast<uint32_t>(plan.rows), 1, 1};
  auto report = emulator::Launch(options, [&](const emulator::Place& at) {
    if (at.thread != 0) return;
    const int row = static_cast<int>(at.block.x);
    MaskLookup lookup(lists, 0, 0);
    for (int key = 0; key < plan.keys; ++key) {
      wrong[row] += lookup.Shows(row, key) != InPlan(plan, by_keys, row, key);
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

// Defects that an image of these lists may have, with `lines` of the image's.
struct Planted {
  std::string name;
  std::function<void(TileLists& lists, int64_t lines)> plant;
};
const std::vector<Planted>& Mistakes() {
  static const auto* mistakes = new std::vector<Planted>{
      {"a bitmap is empty", [](TileLists& l, int64_t) { std::fill_n(l.bitmaps, 32, 0); }},
      {"the neighbour's bitmap",
       [](TileLists& l, int64_t) { l.tiles[l.lines[0].begin] += 1u << kListedTileBits; }},
      {"a partial tile counts as full",
       [](TileLists& l, int64_t) { l.tiles[l.lines[0].begin] &= kListedTileMask; }},
      {"a tile's number is off by one",
       [](TileLists& l, int64_t) { l.tiles[l.lines[0].begin] ^= 1; }},
      {"a line's last tile is lost", [](TileLists& l, int64_t) { --l.lines[0].end; }},
      {"a line is its neighbour", [](TileLists& l, int64_t) { std::swap(l.lines[0], l.lines[1]); }},
      {"bitmaps count from the first plan's",
       [](TileLists& l, int64_t lines) {
         for (int64_t n = 0; n < lines; ++n) l.lines[n].bitmap = 0;
       }},
      {"every (b, h) has the first plan", [](TileLists& l, int64_t) { l.plan_of = nullptr; }},
      {"lists of the other direction", [](TileLists& l, int64_t) { l.by_keys ^= 1; }},
      {"a square's lanes in another order",
       [](TileLists& l, int64_t) { std::reverse(l.bitmaps, l.bitmaps + 32); }},
  };
  return *mistakes;
}

// Two patterns, of which (0, 1) has the second.
TEST(MaskLayout, EachPlantedMistakeIsNoticed) {
  const MaskCall call = {1, 2, 170, 170, {0}};
  const auto window = [](int32_t left, int32_t right) {
    return MaskExpr{.op = RelativeWindow{left, right}, .of = {}};
  };
  auto mask =
      MaskDescription::Make({.pattern = {window(3, 5), window(70, 0)}, .pattern_of = {0, 1}}, call);
  ASSERT_TRUE(mask.ok()) << mask.status();
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  for (const MaskTiling& tiling : {MaskTiling{64, 64, false}, MaskTiling{64, 64, true}}) {
    auto compiled = CompiledMask::Make(**mask, {}, call, OptionsOf(tiling));
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    const MaskLayout layout = LayOutMask(*compiled, p, tiling);
    for (const Planted& mistake : Mistakes()) {
      std::vector<std::byte> image = MaskImage(*compiled, p, layout);
      TileLists lists[2];
      int wrong = 0;
      for (int h : {0, 1}) {
        lists[h] = ListsAt(layout, reinterpret_cast<uint64_t>(image.data()), 0, h);
        wrong += Wrong(lists[h], compiled->PlanAt(0, h));
      }
      ASSERT_EQ(wrong, 0);
      mistake.plant(lists[1], 2 * layout.lists.plan_lines);
      lists[0].by_keys = lists[1].by_keys;
      for (int h : {0, 1}) wrong += Wrong(lists[h], compiled->PlanAt(0, h));
      EXPECT_GT(wrong, 0) << mistake.name << (tiling.by_keys ? ", by keys" : ", by rows");
    }
  }
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
