// Lists and bitmaps of a bool mask against its bits, one by one.
#include "kernels/rules/mask_tiles.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "tests/emulator/block.h"

namespace attnd {
namespace {

struct Mask {
  int rows, columns;
  std::vector<uint8_t> bits;
  int row_bytes() const { return (columns + 7) / 8; }
  bool At(int row, int column) const {
    return bits[row * row_bytes() + column / 8] >> (column % 8) & 1;
  }
};

// Most blocks of 32×32 hold nothing or everything; bits beyond the columns mean nothing.
Mask RandomMask(Random& random) {
  Mask mask = {
      static_cast<int>(random.Between(1, 300)), static_cast<int>(random.Between(1, 2500)), {}};
  mask.bits.resize(int64_t{mask.rows} * mask.row_bytes());
  const uint64_t salt = random.Bits();
  for (int row = 0; row < mask.rows; ++row) {
    for (int byte = 0; byte < mask.row_bytes(); ++byte) {
      Random block(salt + static_cast<uint64_t>(row / 32 * 1000 + byte / 4));
      const double fill = block.Uniform();
      uint8_t bits = fill < 0.6 ? 0 : 0xff;
      if (fill > 0.8) bits = static_cast<uint8_t>(random.Bits());
      if (byte == mask.row_bytes() - 1 && mask.columns % 8 != 0) {
        const auto beyond = static_cast<uint8_t>(0xff << mask.columns % 8);
        bits = random.Chance(0.5) ? bits | beyond : bits & static_cast<uint8_t>(~beyond);
      }
      mask.bits[row * mask.row_bytes() + byte] = bits;
    }
  }
  return mask;
}

struct Tiling {
  int rows, keys;
  bool by_keys;
};

int Count(int length, int size) { return (length + size - 1) / size; }

// A line's tiles: their numbers, and whether they hide anything.
std::vector<std::pair<int, bool>> Expected(const Mask& mask, const Tiling& tiling, int line,
                                           int tiles) {
  std::vector<std::pair<int, bool>> listed;
  for (int tile = 0; tile < tiles; ++tile) {
    const int row_begin = (tiling.by_keys ? tile : line) * tiling.rows;
    const int key_begin = (tiling.by_keys ? line : tile) * tiling.keys;
    bool any = false, all = true;
    for (int row = row_begin; row < std::min(mask.rows, row_begin + tiling.rows); ++row) {
      for (int key = key_begin; key < std::min(mask.columns, key_begin + tiling.keys); ++key) {
        any = any || mask.At(row, key);
        all = all && mask.At(row, key);
      }
    }
    if (any) listed.emplace_back(tile, !all);
  }
  return listed;
}

void Launch(int blocks, int threads, int64_t shared_bytes,
            const std::function<void(const emulator::Place&)>& body) {
  emulator::LaunchOptions options;
  options.grid = {static_cast<uint32_t>(blocks), 1, 1};
  options.threads = threads;
  options.shared_bytes = shared_bytes;
  auto report = emulator::Launch(options, body);
  ASSERT_TRUE(report.ok()) << report.status();
}

// Lists of a mask, as the kernel makes them, with room for all.
struct Lists {
  std::vector<MaskLine> lines;
  std::vector<uint32_t> tiles, bitmaps;
  ProblemDesc problem = {};

  Lists(const Mask& mask, const Tiling& tiling) {
    int own = Count(mask.rows, tiling.rows), others = Count(mask.columns, tiling.keys);
    if (tiling.by_keys) std::swap(own, others);
    lines.resize(own);
    tiles.assign(int64_t{own} * others, 0xdeadbeef);
    bitmaps.assign(int64_t{own} * others * BitmapWords(tiling.rows, tiling.keys), 0xdeadbeef);
    problem.mask = {mask.bits.data(), 0, 0, mask.row_bytes(), mask.rows, mask.columns};
    TileLists& lists = problem.tile_lists;
    lists.lines = lines.data();
    lists.tiles = tiles.data();
    lists.bitmaps = bitmaps.data();
    lists.plan_lines = own;
    lists.line_tiles = others;
    lists.tile_rows = tiling.rows;
    lists.tile_keys = tiling.keys;
    lists.by_keys = tiling.by_keys;
    std::vector<TileWork> work;
    for (int line = 0; line < own; ++line) work.push_back({0, 0, 0, line});
    const LaunchParams params = {&problem, work.data(), own};
    Launch(own, MaskTilesKernel::kThreads, sizeof(MaskTilesKernel::Shared),
           [&](const emulator::Place& at) {
             MaskTilesKernel::Run(params, ThreadIndex{at.thread, static_cast<int>(at.block.x)},
                                  *reinterpret_cast<MaskTilesKernel::Shared*>(at.shared));
           });
  }
};

void CheckLists(const Mask& mask, const Tiling& tiling, const Lists& lists) {
  for (size_t line = 0; line < lists.lines.size(); ++line) {
    std::vector<std::pair<int, bool>> listed;
    for (uint32_t n = lists.lines[line].begin; n < lists.lines[line].end; ++n) {
      listed.emplace_back(lists.tiles[n] & kListedTileMask,
                          lists.tiles[n] >> kListedTileBits != 0);
    }
    const int others = lists.problem.tile_lists.line_tiles;
    EXPECT_EQ(listed, Expected(mask, tiling, static_cast<int>(line), others))
        << "line " << line << " of " << lists.lines.size() << ", " << others << " tiles";
  }
}

// Place by place, as slow paths look: one row a block. A mask with one row or column is for all.
void CheckPlaces(const Mask& mask, const Lists& lists, int rows, int keys) {
  std::vector<int> wrong(rows);
  Launch(rows, 32, 0, [&](const emulator::Place& at) {
    if (at.thread != 0) return;
    const int row = static_cast<int>(at.block.x);
    MaskLookup lookup(lists.problem.tile_lists, 0, 0);
    for (int key = 0; key < keys; ++key) {
      const bool visible = mask.At(mask.rows == 1 ? 0 : row, mask.columns == 1 ? 0 : key);
      wrong[row] += lookup.Shows(row, key) != visible;
    }
  });
  EXPECT_EQ(wrong, std::vector<int>(rows));
}

void Check(const Mask& mask, const Tiling& tiling) {
  const Lists lists(mask, tiling);
  CheckLists(mask, tiling, lists);
  const bool all_rows = mask.rows == 1 && tiling.by_keys;
  const bool all_keys = mask.columns == 1 && !tiling.by_keys;
  CheckPlaces(mask, lists, all_rows ? 70 : mask.rows, all_keys ? 70 : mask.columns);
}

TEST(MaskTiles, ListsTilesThatHoldAnythingForEveryTiling) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Random random(seed);
    const Mask mask = RandomMask(random);
    for (const Tiling& tiling :
         {Tiling{128, 32, false}, Tiling{64, 32, false}, Tiling{64, 128, true},
          Tiling{64, 64, true}, Tiling{64, 32, true}}) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", mask.rows, " rows, ", mask.columns,
                                " columns; tiles of ", tiling.rows, " rows, ", tiling.keys,
                                tiling.by_keys ? " keys, by keys" : " keys"));
      Check(mask, tiling);
      Check(Mask{1, mask.columns, mask.bits}, tiling);
      Check(Mask{mask.rows, 1, mask.bits}, tiling);
    }
  }
}

}  // namespace
}  // namespace attnd
