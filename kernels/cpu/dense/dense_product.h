// Products of large matrices for linear ops: values by weights, gradients by weights, and values by
// gradients. float32 arithmetic on operands of any element.
//     C(m, n) = Σ_k A(m, k)·B(k, n)
// Sums over k run in stretches of kDenseDepth, each a chain of multiply-adds in ascending order;
// stretches are added in order. Operands of bfloat16 are multiplied on MatrixTiles, if there are
// any: a chain of 32 products at a time, as tile_product.h says, in stretches of kTilesDepth. So a
// row of C depends on its row of A and on B alone: not on the number of rows, on threads or on how
// C is cut into items.
//
// An item is at most kDenseRows × kDenseColumns of C, for one thread with scratch of its own. B
// comes in panels, or row by row. A stretch of A is copied to scratch first: where rows of a matrix
// lie a multiple of 4 KiB apart, few of them fit into a cache at once. Any thread.
#pragma once

#include <cstdint>

#include "attention/element.h"
#include "base/round_up.h"
#include "kernels/cpu/tile_product.h"
#include "kernels/dense/operands.h"

namespace attnd {

// Rows of B are read again by each item: with 192 rows that cost 5 to 10 % where B is no panels.
inline constexpr int64_t kDenseRows = 384;
inline constexpr int64_t kFewestDenseRows = 48;
inline constexpr int64_t kDenseColumns = 256;
// A panel's stretch of B, 32 KiB, stays in a first-level cache while the rows of A pass by.
inline constexpr int64_t kDenseDepth = 128;
inline constexpr int64_t kDensePanel = 64;  // columns
// Two tiles of columns of B, 32 KiB, stay in a first-level cache, the tiles of A in a second-level
// one.
inline constexpr int64_t kTilesDepth = 512;
inline constexpr int64_t kDenseScratchFloats =
    (kDenseRows + kDenseColumns) * kTilesDepth / 2 + kDenseRows * kDenseColumns;
static_assert((kDenseRows + kDenseColumns) * kTilesDepth / 2 >=
              kDenseRows * kDenseDepth + kDenseDepth * kDensePanel);

// Row-major, rows `stride` elements apart.
struct DenseMatrix {
  const void* data = nullptr;
  ElementType element = ElementType::kFloat32;
  int64_t stride = 0;
};

enum class DenseOrder : uint8_t {
  kRows,    // A: row m holds its numbers over k
  kDepth,   // A or B: row k holds the numbers of all m or n
  kPanels,  // B: as PackPanels leaves them, `element` being the operands'; no stride
};

enum class DenseResult : uint8_t {
  kStore,      // C ← sum + bias, rounded to its element
  kAdd,        // C ← C + sum, the sum rounded first, then C
  kAddBlocks,  // float32 C ← C + the sum over kGradientBlockRows of k, block by block
};

struct DenseProduct {
  int64_t rows = 0, columns = 0, depth = 0;
  ElementType operand = ElementType::kFloat32;  // A and B are rounded to it before
  DenseMatrix a;
  DenseOrder a_order = DenseOrder::kRows;
  DenseMatrix b;
  DenseOrder b_order = DenseOrder::kPanels;
  DenseResult result = DenseResult::kStore;
  const void* bias = nullptr;  // [columns], or none; kStore
  ElementType bias_element = ElementType::kFloat32;
  void* c = nullptr;  // row-major [rows, columns]
  ElementType c_element = ElementType::kFloat32;
  int64_t item_rows = kDenseRows;  // a multiple of 6, at most kDenseRows
};

// Item rows such that there are two items a thread, if each is worth a thread.
int64_t DenseItemRows(const DenseProduct& product, int threads);
int64_t DenseItems(const DenseProduct& product);
void RunDenseItem(const DenseProduct& product, int64_t item, float* scratch);

// B(k, n) = source[n][k] in panels of kDensePanel columns, in the operands' element, zero beyond
// `columns`: strips of as many columns as a register tile has, [depth][those columns] each, so that
// a strip's stretch is contiguous; or tiles.
inline int64_t DensePanels(int64_t columns) { return RoundUp(columns, kDensePanel) / kDensePanel; }
inline int64_t PackedElements(int64_t columns, int64_t depth) {
  return DensePanels(columns) * kDensePanel * RoundUp(depth, kTileDepth);
}
struct PanelSource {
  DenseMatrix matrix;  // [columns, depth]
  int64_t columns = 0, depth = 0;
};
void PackPanel(const PanelSource& source, int64_t panel, ElementType operand, void* packed);

}  // namespace attnd
