// What a matrix product kernel is told: ProductDesc, one product C = A·B of a linear layer, filled
// by the host and read by every architecture's kernel and the emulator. A block makes 128 × 128
// numbers of C; every number is one float32 chain over ascending depth, in the instruction's own
// order, so its bits depend on its row of A, its column of B and the depth alone.
//
// Launch     LaunchParams.dense; a block for each tile of ProductTiles(dense[0]), or, where `tiles`
//            is given, tile `tile` of dense[`problem`]: several products share a launch.
// Rows       of any size, stride and alignment of an element. Fast: 16-byte aligned rows.
// Errors     none here: the host has refused what a kernel cannot do.
#pragma once

#include "kernels/rules/params.h"

namespace attnd {

enum ProductResult : int32_t {
  kProductStore,      // C = A·B + bias, rounded once to C's element
  kProductAdd,        // C += A·B, C in float32
  kProductAddBlocks,  // the same for each kProductBlockDepth of the depth, in ascending order
};

// What of A and B a kernel reads by rows: kProductRowsRows A [rows, depth] and B [columns, depth],
// kProductRowsDepth A [rows, depth] and B [depth, columns], kProductDepthDepth A [depth, rows] and
// B [depth, columns].
struct ProductDesc {
  const void* a;
  const void* b;
  const void* bias;                      // [columns], with kProductStore alone
  void* c;                               // [rows, columns]
  int64_t a_stride, b_stride, c_stride;  // elements from row to row; of a and b below 2^30
  int32_t rows, columns, depth;
  int32_t result;        // ProductResult
  int32_t bias_element;  // BiasElementCode
  int32_t c_element;     // likewise, never kBiasNone; float32 unless kProductStore
};

inline constexpr int32_t kProductTile = 128;  // rows and columns of C that a block makes
inline constexpr int32_t kProductStep = 32;   // depth of what it holds in shared memory at a time
// Weight gradients are summed by tensor cores over so many rows of a call, then added in float32:
// Volta's accumulators truncate, and calls cut at its multiples give the bits of one.
inline constexpr int32_t kProductBlockDepth = 1024;

ATTN_HD constexpr int32_t ProductTilesAlong(int32_t size) {
  return (size + kProductTile - 1) / kProductTile;
}
ATTN_HD constexpr int64_t ProductTiles(const ProductDesc& p) {
  return int64_t{ProductTilesAlong(p.rows)} * ProductTilesAlong(p.columns);
}

// Of a tile, C's first row and column: eight tiles down, then the next column, so that what runs at
// a time shares rows of A and B in the cache.
struct ProductPlace {
  int32_t row, column;
};
ATTN_HD ProductPlace ProductPlaceOf(const ProductDesc& p, int32_t tile) {
  constexpr int32_t kBand = 8;
  const int32_t row_tiles = ProductTilesAlong(p.rows);
  const int32_t band_tiles = kBand * ProductTilesAlong(p.columns);
  const int32_t first = tile / band_tiles * kBand, within = tile % band_tiles;
  const int32_t height = row_tiles - first < kBand ? row_tiles - first : kBand;
  return {(first + within % height) * kProductTile, within / height * kProductTile};
}

}  // namespace attnd
