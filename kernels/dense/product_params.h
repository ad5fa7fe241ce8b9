// product_params.h: ProductDesc describes one product C = A·B of a linear layer, at
// LaunchParams.dense. The host fills it; every architecture's kernel and the emulator read it.
// Every number of C is one chain of float32 sums over ascending depth, in the instruction's own
// order (float32: of sums of eight terms), so its bits depend on its row of A, its column of B and
// the depth alone.
//
// Tensor cores   kProductRowsRows and its like: a block for each tile of ProductTiles and each
//                of its ProductTurns, in the order of ProductPartOf and ProductPlaceOf. Tiles of
//                any size give the same bits. Wide ones (WideProductDesc) come by tensor maps;
//                their blocks take many tiles each, or items of gradients (GradientItemOf).
//                A lies by depth with kProductAddBlocks alone, and sm_70 then takes sums below
//                2^-126 for zero. A and B have one element; all are 16-byte aligned, their strides,
//                and what lies in a row of them, multiples of the numbers in 16 bytes of it, rows
//                of A and B below kMostProductRowBytes.
// Errors         none here: the host has refused what a kernel cannot do.
#pragma once

#include "kernels/ptx/tensor_map.h"
#include "kernels/rules/params.h"

namespace attnd {

enum ProductResult : int32_t {
  kProductStore,      // C = A·B + bias, rounded once to C's element
  kProductAdd,        // C += A·B, rounded to C's element, then added
  kProductAddBlocks,  // the same for each kProductBlockDepth of the depth, in ascending order
};

// A curve of C's numbers as they are rounded to C's element, which is the operands'; its tensors
// lie as C does. One of the two pointers is null.
struct ProductCurve {
  int32_t curve;   // CurveCode; 0: none
  void* value;     // ← curve(C), beside C, which may be null then
  const void* at;  // C ← C · the curve's slope at these numbers
};

// An operand lies by rows, [rows or columns of C, depth], or by depth, [depth, rows or columns].
struct ProductDesc {
  const void* a;
  const void* b;
  const void* bias;                      // [columns], with kProductStore alone
  void* c;                               // [rows, columns]
  int64_t a_stride, b_stride, c_stride;  // elements from row to row; of a and b below 2^30
  int32_t rows, columns, depth;
  int32_t result;        // ProductResult
  int32_t bias_element;  // BiasElementCode
  int32_t c_element;     // likewise, never kBiasNone; float32 with kProductAddBlocks
  // kProductAddBlocks on tensor cores: a word a tile, in wide ones kWideGradientTurns, zero before
  // and after.
  int32_t* turns;
  ProductCurve curve;  // with kProductStore alone, on tensor cores
};

// A block of gradients in wide tiles takes an item at a time: one of the first so many tiles over
// all of the depth, or one of the others over so many blocks of it. A tile has
// kNarrowGradientColumns or kWideGradientColumns.
struct GradientCut {
  int32_t tile_columns, whole_tiles, item_blocks;
};

// When a product of a launch in tiles of kShortProductRows may add to a C that others of the launch
// write too: each warp of a tile once its word is `own`, and makes it `next`.
struct AddTurn {
  int32_t* words;  // kWideProductWarps a tile, zero before and after; null: nobody else writes C
  int32_t own, next;
};

// A product in wide tiles: 16-bit numbers, and the maps of A and B as they lie. A box has
// kWideProductStep columns of the memory: of the depth, or of C's rows (columns); and as many rows
// of it as a tile has rows (columns), or kWideProductStep of the depth.
// A launch makes some products of one depth, described one after the other, that depend on each
// other by AddTurns alone; all have tiles of one size.
struct WideProductDesc {
  ProductDesc product;
  TensorMap a, b;
  AddTurn turn;     // not with kProductAddBlocks
  GradientCut cut;  // with kProductAddBlocks
  int32_t items;    // tiles, or items of a gradient
  int32_t* claims;  // with kProductAddBlocks: a word of the launch, zero before and after
};

// Rows and columns of C that a block makes; small ones where large ones leave a GPU idle.
inline constexpr int32_t kProductTile = 128, kSmallProductTile = 64;
// The sizes of a wide tile, and the depth that it holds at a time. Of gradients of weights
// registers hold both C and the sums to add to it, so these have fewer columns.
inline constexpr int32_t kWideProductRows = 128, kWideProductColumns = 128,
                         kNarrowGradientColumns = 128, kWideGradientColumns = 192,
                         kWideProductStep = 64;
// Rows of a wide tile where a multiprocessor has at most one, and the warps that compute a tile.
inline constexpr int32_t kShortProductRows = 64, kWideProductWarps = 4;
// Words of ProductDesc.turns that a wide tile of gradients has at most.
inline constexpr int32_t kWideGradientTurns = 16;
// Depth of what it holds in shared memory at a time, of numbers of so many bytes.
template <int32_t kBytes>
inline constexpr int32_t kProductStep = 64 / kBytes;
inline constexpr int64_t kMostProductRowBytes = int64_t{1} << 25;
// Weight gradients are summed by tensor cores over so many rows of a call, then added in float32:
// Volta's accumulators truncate, and calls cut at its multiples give the bits of one.
inline constexpr int32_t kProductBlockDepth = 1024;

ATTN_HD constexpr int32_t ProductTilesAlong(int32_t size, int32_t tile_size) {
  return (size + tile_size - 1) / tile_size;
}
ATTN_HD constexpr int64_t ProductTiles(const ProductDesc& p, int32_t tile_rows,
                                       int32_t tile_columns) {
  return int64_t{ProductTilesAlong(p.rows, tile_rows)} * ProductTilesAlong(p.columns, tile_columns);
}
ATTN_HD constexpr int64_t ProductTiles(const ProductDesc& p, int32_t tile_size) {
  return ProductTiles(p, tile_size, tile_size);
}

// A tile's first row and column of C. Tiles go 1,024 rows down, then to the next column, so that
// those that run at a time share rows of A and B in the cache.
struct ProductPlace {
  int32_t row, column;
};
template <int32_t kTileRows, int32_t kTileColumns = kTileRows>
ATTN_HD ProductPlace ProductPlaceOf(const ProductDesc& p, int32_t tile) {
  constexpr uint32_t kBand = 1024 / kTileRows;  // unsigned: fewer instructions to divide
  const uint32_t row_tiles = ProductTilesAlong(p.rows, kTileRows);
  const uint32_t band_tiles = kBand * ProductTilesAlong(p.columns, kTileColumns);
  const uint32_t band = tile / band_tiles, within = tile - band * band_tiles;
  const uint32_t first = band * kBand, height = row_tiles - first;
  const uint32_t column = height < kBand ? within / height : within / kBand;
  const uint32_t row = first + within - column * (height < kBand ? height : kBand);
  return {static_cast<int32_t>(row * kTileRows), static_cast<int32_t>(column * kTileColumns)};
}

// The part of C that block `block` sums. It is a tile over all of the depth or, with
// kProductAddBlocks, over a block of the depth: the first blocks of all tiles of a band, then their
// second ones and so on, then those of the next band, so that the sums to which blocks add are
// still in the cache. A band has kProductBand tiles, as many as an H100 has multiprocessors, and
// the last one also the rest, since few tiles wait for each other. A later block waits for its turn
// to add, for an earlier one that has begun before it.
inline constexpr int32_t kProductBand = 132;
struct ProductPart {
  int32_t tile, turn, begin, depth;
  bool is_last;
};
ATTN_HD constexpr int32_t ProductTurns(const ProductDesc& p) {
  if (p.result != kProductAddBlocks || p.depth == 0) return 1;
  return (p.depth + kProductBlockDepth - 1) / kProductBlockDepth;
}
template <int32_t kTile>
ATTN_HD ProductPart ProductPartOf(const ProductDesc& p, int32_t block) {
  if (p.result != kProductAddBlocks) return {block, 0, 0, p.depth, true};
  const auto tiles = static_cast<uint32_t>(ProductTiles(p, kTile));
  const uint32_t bands = tiles < kProductBand ? 1 : tiles / kProductBand;
  uint32_t band = static_cast<uint32_t>(block) / (kProductBand * ProductTurns(p));
  if (band >= bands) band = bands - 1;
  const uint32_t first = band * kProductBand;
  const uint32_t of_band = band == bands - 1 ? tiles - first : kProductBand;
  const uint32_t within = static_cast<uint32_t>(block) - first * ProductTurns(p);
  const auto turn = static_cast<int32_t>(within / of_band);
  const auto tile = static_cast<int32_t>(first + within - turn * of_band);
  const int32_t begin = turn * kProductBlockDepth, left = p.depth - begin;
  return {tile, turn, begin, left < kProductBlockDepth ? left : kProductBlockDepth,
          left <= kProductBlockDepth};
}

// Finds one of a launch's items: `number` among its product's.
struct WideItem {
  const WideProductDesc* desc;
  int32_t number;
};
ATTN_HD WideItem WideItemOf(const WideProductDesc* first, int32_t item) {
  while (item >= first->items) item -= first++->items;
  return {first, item};
}

// An item of a gradient in wide tiles: blocks [first, end) of the depth of a tile. Whole tiles come
// first, then the first items of all others, then their second ones and so on: an item waits for an
// earlier one, which has begun before it.
struct GradientItem {
  int32_t tile, first, end;
  bool is_last;
};
template <int32_t kTileRows, int32_t kTileColumns>
ATTN_HD GradientItem GradientItemOf(const ProductDesc& p, const GradientCut& cut, int32_t item) {
  const int32_t turns = ProductTurns(p);
  if (item < cut.whole_tiles) return {item, 0, turns, true};
  const auto others = static_cast<uint32_t>(ProductTiles(p, kTileRows, kTileColumns)) -
                      static_cast<uint32_t>(cut.whole_tiles);
  const uint32_t within = static_cast<uint32_t>(item) - static_cast<uint32_t>(cut.whole_tiles);
  const uint32_t round = within / others;
  const auto tile =
      static_cast<int32_t>(static_cast<uint32_t>(cut.whole_tiles) + within - round * others);
  const int32_t first = static_cast<int32_t>(round) * cut.item_blocks;
  const int32_t end = first + cut.item_blocks;
  if (end >= turns) return {tile, first, turns, true};
  return {tile, first, end, false};
}

}  // namespace attnd
