// Lists of a mask's tiles against a plain count of its bits.
#include "kernels/rules/mask_tiles.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "kernels/emulator/block.h"

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

// rank and list of one line, as params.h has them.
std::vector<uint16_t> Expected(const Mask& mask, const Tiling& tiling, int line, int tiles) {
  std::vector<uint16_t> rank, list;
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
    rank.push_back(static_cast<uint16_t>(list.size()));
    if (any) list.push_back(static_cast<uint16_t>(tile | (all ? 0 : 0x8000)));
  }
  rank.push_back(static_cast<uint16_t>(list.size()));
  rank.insert(rank.end(), list.begin(), list.end());
  return rank;
}

int Count(int length, int size) { return (length + size - 1) / size; }

template <bool kByKeys>
void Run(const LaunchParams& params, int lines) {
  using Kernel = MaskTilesKernel<kByKeys>;
  emulator::LaunchOptions options;
  options.grid = {static_cast<uint32_t>(lines), 1, 1};
  options.threads = Kernel::kThreads;
  options.shared_bytes = sizeof(typename Kernel::Shared);
  auto report = emulator::Launch(options, [&](const emulator::Place& at) {
    Kernel::Run(params, ThreadIndex{at.thread, static_cast<int>(at.block.x)},
                *reinterpret_cast<typename Kernel::Shared*>(at.shared));
  });
  ASSERT_TRUE(report.ok()) << report.status();
}

void Check(const Mask& mask, const Tiling& tiling) {
  int lines = Count(mask.rows, tiling.rows), tiles = Count(mask.columns, tiling.keys);
  if (tiling.by_keys) std::swap(lines, tiles);
  std::vector<uint16_t> numbers(int64_t{lines} * (2 * tiles + 1), 0xdead);
  ProblemDesc problem = {};
  problem.mask.data = mask.bits.data();
  problem.mask.row = mask.row_bytes();
  problem.tile_lists = {numbers.data(), 0,           0,         2 * tiles + 1, tiles,
                        tiling.rows,    tiling.keys, mask.rows, mask.columns};
  std::vector<TileWork> work;
  for (int line = 0; line < lines; ++line) work.push_back({0, 0, 0, line});
  const LaunchParams params = {&problem, work.data(), lines};
  tiling.by_keys ? Run<true>(params, lines) : Run<false>(params, lines);
  for (int line = 0; line < lines; ++line) {
    std::vector<uint16_t> expected = Expected(mask, tiling, line, tiles);
    const auto first = numbers.begin() + int64_t{line} * (2 * tiles + 1);
    EXPECT_EQ(std::vector<uint16_t>(first, first + static_cast<int64_t>(expected.size())), expected)
        << "line " << line << " of " << lines << ", " << tiles << " tiles";
  }
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
    }
  }
}

}  // namespace
}  // namespace attnd
