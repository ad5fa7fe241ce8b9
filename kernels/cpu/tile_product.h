// Matrix products on tiles of bfloat16, what Intel's AMX computes: a tile is 16 rows of 64 bytes,
// and one instruction adds the product of a 16×32 and a 32×16 tile of bfloat16 to 16×16 float32:
// 16384 operations in 16 cycles, ten times AVX-512's float32.
//
// Other numbers are sums of two bfloat16 terms (terms-inl.h). An operand lies packed, tile after
// tile of 1 KiB:
//
//   A [block of 16 rows][block of 32 k][term]      a row is 16 pairs (k, k + 16)
//   B [block of 16 columns][block of 32 k][term]   a row is one pair (k, k + 16) of 16 columns
//
// so that pairs are made of two vectors without moving lanes, and B of a transposed matrix is A's
// tile with its 32-bit words transposed. Inside the instruction even and odd places are two chains
// of 16 fused multiply-adds from zero; their sum is added to C. Numbers below 2^-126 count as zero.
#pragma once

#include <cstdint>

#include "kernels/cpu/tiles.h"

namespace attnd {

inline constexpr int kTileSide = 16;              // rows, and columns of C
inline constexpr int kTileDepth = 2 * kTileSide;  // k of one product
inline constexpr int kBlockSide = 2 * kTileSide;  // of C, kept in registers over all k
inline constexpr int64_t kTileWords = 16 * 32;    // bfloat16 numbers of one tile

// C (+)= A·B for blocks of kBlockSide rows and columns of C; all three hold whole tiles, C is
// row-major. A column_tiles or row_tiles that is odd leaves half a block.
struct TileProduct {
  const uint16_t* a;
  const uint16_t* b;
  int64_t a_block, b_block;  // tiles from one block of rows or columns to the next
  int a_terms, b_terms;      // 1 or 2
  float* c;
  int64_t c_row;
  int row_tiles, column_tiles;
  int k_begin, k_end;  // blocks of kTileDepth
  bool accumulate;     // otherwise C is overwritten
  // Optional, one span per block of rows: the tiles of columns that are wanted; others stay as they
  // were.
  const Span* column_limits = nullptr;
  uint64_t k_wanted = ~uint64_t{0};  // bit k: whether block k is; A or B is zero in others
};

}  // namespace attnd
