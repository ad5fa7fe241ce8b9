// The loops of a TileProduct over operations on eight tile registers, which the processor's unit
// and the emulated one of tests bring as `Tiles`:
//
//     static void Zero<int kTile>();
//     static void Load<int kTile>(const void* from, int64_t row_bytes);
//     static void Store<int kTile>(void* to, int64_t row_bytes);
//     static void Multiply<int kC, int kA, int kB>();      C += A·B
//
// Registers 0 to 3 are C, 4 and 5 the block's rows of A, 6 and 7 its columns of B.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/tile_product.h"

namespace attnd {

// The products of terms, small ones first. Each shares a term with the one before, so that only A
// or only B is loaded anew: two loads of 8 cycles beside four products of 16.
struct TermPair {
  int8_t a, b;
};
struct TermOrder {
  int count;
  TermPair pairs[4];
};

inline const TermOrder& OrderOfTerms(int a_terms, int b_terms) {
  static constexpr TermOrder kOrders[2][2] = {
      {{1, {{0, 0}}}, {2, {{0, 1}, {0, 0}}}},
      {{2, {{1, 0}, {0, 0}}}, {4, {{1, 1}, {0, 1}, {0, 0}, {1, 0}}}}};
  return kOrders[a_terms - 1][b_terms - 1];
}

// Asks for tiles that lie one after another. Loads of tiles that are not in the first-level cache
// take 50 ns each, one after another.
inline void PrefetchTiles(const uint16_t* tiles, int count) {
  for (int line = 0; line < count * 16; ++line) __builtin_prefetch(tiles + line * 32);
}

// One block of C, and what is to be asked for meanwhile.
struct Block {
  const uint16_t *a, *b;
  float* c;
  int64_t c_row;
  const uint16_t *next_a, *next_b;  // of the next block, if they are to be asked for
  bool a_is_near, new_b;            // A is in the first-level cache; B is not
};

// kRows × kColumns tiles.
template <class Tiles, int kRows, int kColumns>
void MultiplyBlock(const TileProduct& p, const Block& block) {
  const TermOrder& order = OrderOfTerms(p.a_terms, p.b_terms);
  Tiles::template Zero<0>();
  if constexpr (kColumns == 2) Tiles::template Zero<1>();
  if constexpr (kRows == 2) Tiles::template Zero<2>();
  if constexpr (kRows == 2 && kColumns == 2) Tiles::template Zero<3>();
  const int64_t second_a = p.a_block * kTileWords, second_b = p.b_block * kTileWords;
  const int64_t a_step = p.a_terms * kTileWords, b_step = p.b_terms * kTileWords;
  for (int k = p.k_begin; k < p.k_end; ++k) {
    if ((p.k_wanted >> k & 1) == 0) continue;
    const uint16_t* a = block.a + k * a_step;
    const uint16_t* b = block.b + k * b_step;
    const bool last = k + 1 == p.k_end;
    const uint16_t* next_a = last ? block.next_a : block.a_is_near ? nullptr : a + a_step;
    const uint16_t* next_b = last ? block.next_b : block.new_b ? b + b_step : nullptr;
    if (next_a != nullptr) {
      PrefetchTiles(next_a, p.a_terms);
      if constexpr (kRows == 2) PrefetchTiles(next_a + second_a, p.a_terms);
    }
    if (next_b != nullptr) {
      PrefetchTiles(next_b, p.b_terms);
      if constexpr (kColumns == 2) PrefetchTiles(next_b + second_b, p.b_terms);
    }
    TermPair loaded = {-1, -1};
    for (int n = 0; n < order.count; ++n) {
      const TermPair pair = order.pairs[n];
      if (pair.a != loaded.a) {
        Tiles::template Load<4>(a + pair.a * kTileWords, 64);
        if constexpr (kRows == 2) Tiles::template Load<5>(a + second_a + pair.a * kTileWords, 64);
      }
      if (pair.b != loaded.b) {
        Tiles::template Load<6>(b + pair.b * kTileWords, 64);
        if constexpr (kColumns == 2) {
          Tiles::template Load<7>(b + second_b + pair.b * kTileWords, 64);
        }
      }
      loaded = pair;
      Tiles::template Multiply<0, 4, 6>();
      if constexpr (kColumns == 2) Tiles::template Multiply<1, 4, 7>();
      if constexpr (kRows == 2) Tiles::template Multiply<2, 5, 6>();
      if constexpr (kRows == 2 && kColumns == 2) Tiles::template Multiply<3, 5, 7>();
    }
  }
  const int64_t row_bytes = block.c_row * sizeof(float);
  Tiles::template Store<0>(block.c, row_bytes);
  if constexpr (kColumns == 2) Tiles::template Store<1>(block.c + kTileSide, row_bytes);
  float* below = block.c + kTileSide * block.c_row;
  if constexpr (kRows == 2) Tiles::template Store<2>(below, row_bytes);
  if constexpr (kRows == 2 && kColumns == 2) Tiles::template Store<3>(below + kTileSide, row_bytes);
}

[[gnu::target("avx512f")]] inline void AddBlock(const float* block, int rows, int columns, float* c,
                                                int64_t c_row) {
  using Floats [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = float;
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < columns; n += kTileSide) {
      *reinterpret_cast<Floats*>(c + r * c_row + n) +=
          *reinterpret_cast<const Floats*>(block + r * kBlockSide + n);
    }
  }
}

template <class Tiles>
void MultiplyBlock(const TileProduct& p, const Block& block, int rows, int columns) {
  if (rows == 2) {
    columns == 2 ? MultiplyBlock<Tiles, 2, 2>(p, block) : MultiplyBlock<Tiles, 2, 1>(p, block);
  } else {
    columns == 2 ? MultiplyBlock<Tiles, 1, 2>(p, block) : MultiplyBlock<Tiles, 1, 1>(p, block);
  }
}

// Columns outside: a block of columns of B stays in the first-level cache while A passes by.
template <class Tiles>
void MultiplyTiles(const TileProduct& p) {
  constexpr int kNearTiles = 24;  // half of a first-level cache
  // A block's sum is added to C in float32 as a whole: C is rounded once.
  alignas(64) float sums[kBlockSide * kBlockSide];
  const bool small_a = p.row_tiles * (p.k_end - p.k_begin) * p.a_terms <= kNearTiles;
  const int64_t next_a = 2 * p.a_block * kTileWords, next_b = 2 * p.b_block * kTileWords;
  const int64_t first_a = p.k_begin * p.a_terms * kTileWords;
  const int64_t first_b = p.k_begin * p.b_terms * kTileWords;
  for (int column = 0; column < p.column_tiles; column += 2) {
    bool new_b = true;
    for (int row = 0; row < p.row_tiles; row += 2) {
      if (p.column_limits != nullptr && (p.column_limits[row / 2].end <= column ||
                                         p.column_limits[row / 2].begin >= column + 2)) {
        continue;
      }
      const int rows = std::min(2, p.row_tiles - row);
      const int columns = std::min(2, p.column_tiles - column);
      const bool last_row = row + 2 >= p.row_tiles, last = last_row && column + 2 >= p.column_tiles;
      const uint16_t* a = p.a + row / 2 * next_a;
      const uint16_t* b = p.b + column / 2 * next_b;
      float* c = p.c + row * kTileSide * p.c_row + column * kTileSide;
      const bool a_is_near = small_a && column > 0;
      MultiplyBlock<Tiles>(
          p,
          {.a = a,
           .b = b,
           .c = p.accumulate ? sums : c,
           .c_row = p.accumulate ? kBlockSide : p.c_row,
           .next_a = a_is_near || last ? nullptr : (last_row ? p.a : a + next_a) + first_a,
           .next_b = last_row && !last ? b + next_b + first_b : nullptr,
           .a_is_near = a_is_near,
           .new_b = new_b},
          rows, columns);
      if (p.accumulate) AddBlock(sums, rows * kTileSide, columns * kTileSide, c, p.c_row);
      new_b = false;
    }
  }
}

}  // namespace attnd
