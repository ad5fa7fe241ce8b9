#include "kernels/cpu/dense/dense_product.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense/dense_product.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/dense/bfloat16_tiles-inl.h"
#include "kernels/cpu/dense/chunks-inl.h"
#include "kernels/cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

static_assert(kDensePanel % kPanelColumns == 0 && kDenseRows % kTileRows == 0);

// The unit that multiplies them, or null.
inline const TileUnit* TilesFor([[maybe_unused]] ElementType operand) {
#if HWY_TARGET == HWY_AVX3
  return operand == ElementType::kBFloat16 ? MatrixTiles() : nullptr;
#else
  return nullptr;
#endif
}

RowsOf Part(const DenseMatrix& of, int64_t row, int64_t column, int64_t rows, int64_t count) {
  const int64_t bytes = (row * of.stride + column) * ElementBytes(of.element);
  return {static_cast<const uint8_t*>(of.data) + bytes, of.stride, static_cast<int>(rows),
          static_cast<int>(count)};
}

// One item.
class DenseItem {
 public:
  DenseItem(const DenseProduct& p, int64_t item, float* scratch)
      : p_(p),
        first_row_(item / ColumnGroups(p) * p.item_rows),
        first_column_(item % ColumnGroups(p) * kDenseColumns),
        rows_(std::min(p.item_rows, p.rows - first_row_)),
        columns_(std::min(kDenseColumns, p.columns - first_column_)),
        sums_(scratch),
        a_(sums_ + kDenseRows * kDenseColumns),
        b_(a_ + kDenseRows * kDenseDepth),
        tiles_(TilesFor(p.operand)) {}

  static int64_t ColumnGroups(const DenseProduct& p) {
    return (p.columns + kDenseColumns - 1) / kDenseColumns;
  }

  void Run() {
    const bool in_blocks = p_.result == DenseResult::kAddBlocks;
    const int64_t step = in_blocks ? kGradientBlockRows : std::max<int64_t>(p_.depth, 1);
    for (int64_t begin = 0; begin < p_.depth; begin += step) {
      const int64_t end = std::min(p_.depth, begin + step);
      tiles_ != nullptr ? SumOnTiles(begin, end) : Sum(begin, end);
      Finish();
    }
  }

 private:
  // sums_ ← A·B over k in [begin, end).
  void Sum(int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += kDenseDepth) {
      const int64_t depth = std::min(kDenseDepth, end - k);
      const Rows a = LoadA(k, depth);
      for (int64_t column = 0; column < columns_; column += kDensePanel) {
        Multiply(a, LoadB(k, depth, first_column_ + column), depth, column, k > begin);
      }
    }
  }

  void SumOnTiles([[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) {
#if HWY_TARGET == HWY_AVX3
    const TileSession session(*tiles_);
    uint16_t* a = reinterpret_cast<uint16_t*>(a_);
    uint16_t* packed = a + kDenseRows * kTilesDepth;
    for (int64_t k = begin; k < end; k += kTilesDepth) {
      const int64_t depth = std::min(kTilesDepth, end - k);
      if (p_.a_order == DenseOrder::kRows) {
        PackTileRows(p_.a.element, Part(p_.a, first_row_, k, rows_, depth),
                     DepthBlocks(depth) * kTileWords, a);
      } else {
        PackTileDepth(p_.a.element, Part(p_.a, k, first_row_, depth, rows_), a);
        TurnTiles(rows_, depth, a);
      }
      const uint16_t* b = packed;
      int64_t b_block = DepthBlocks(depth);
      if (p_.b_order == DenseOrder::kPanels) {
        b_block = DepthBlocks(p_.depth);
        b = static_cast<const uint16_t*>(p_.b.data) +
            (first_column_ / kTileSide * b_block + k / kTileDepth) * kTileWords;
      } else {
        PackTileDepth(p_.b.element, Part(p_.b, k, first_column_, depth, columns_), packed);
      }
      tiles_->multiply({.a = a,
                        .b = b,
                        .a_block = DepthBlocks(depth),
                        .b_block = b_block,
                        .a_terms = 1,
                        .b_terms = 1,
                        .c = sums_,
                        .c_row = kDenseColumns,
                        .row_tiles = TileCount(rows_),
                        .column_tiles = TileCount(columns_),
                        .k_begin = 0,
                        .k_end = DepthBlocks(depth),
                        .accumulate = k > begin});
    }
#endif
  }

  struct Rows {
    const float* data;
    int64_t row, k;  // strides
  };

  Rows LoadA(int64_t k, int64_t depth) const {
    if (p_.a_order == DenseOrder::kRows) {
      LoadRows(p_.a, first_row_ * p_.a.stride + k, rows_, depth, a_, kDenseDepth);
      return {a_, kDenseDepth, 1};
    }
    LoadRows(p_.a, k * p_.a.stride + first_row_, depth, rows_, a_, kDenseRows);
    return {a_, 1, kDenseRows};
  }

  // Strips of kPanelColumns columns of a panel, [depth][kPanelColumns] each, whatever lies beyond
  // the columns.
  struct Strips {
    const float* data;
    int64_t step;  // from one to the next
  };

  Strips LoadB(int64_t k, int64_t depth, int64_t column) const {
    constexpr int64_t kStep = kDenseDepth * kPanelColumns;
    const int64_t count = std::min(kDensePanel, p_.columns - column);
    if (p_.b_order != DenseOrder::kPanels) {
      LoadRows(p_.b, k * p_.b.stride + column, depth, count, b_, kPanelColumns, kStep);
      return {b_, kStep};
    }
    const int64_t at = column * p_.depth + k * kPanelColumns, step = p_.depth * kPanelColumns;
    if (p_.b.element == ElementType::kFloat32) {
      return {static_cast<const float*>(p_.b.data) + at, step};
    }
    for (int64_t n = 0, strip = 0; n < count; n += kPanelColumns, ++strip) {
      LoadFloats(p_.b.element, p_.b.data, at + strip * step, depth * kPanelColumns,
                 b_ + strip * kStep);
    }
    return {b_, kStep};
  }

  // Rows of `count` numbers, the first from `index` on, to rows of `step` floats; `strip_step`: to
  // such rows of each strip.
  void LoadRows(const DenseMatrix& from, int64_t index, int64_t rows, int64_t count, float* out,
                int64_t step, int64_t strip_step = 0) const {
    const int64_t strip = strip_step == 0 ? count : step;
    for (int64_t r = 0; r < rows; ++r, index += from.stride, out += step) {
      if (r + kRowsAhead < rows) {
        AskFor(from.element, from.data, index + kRowsAhead * from.stride, count);
      }
      for (int64_t n = 0, at = 0; n < count; n += strip, at += strip_step) {
        Load(from, index + n, std::min(strip, count - n), out + at);
      }
    }
  }

  void Load(const DenseMatrix& from, int64_t index, int64_t count, float* out) const {
    if (from.element == ElementType::kFloat32 && count % kLanes == 0) {
      const float* at = static_cast<const float*>(from.data) + index;
      for (int64_t n = 0; n < count; n += kLanes) {
        hn::StoreU(hn::LoadU(FloatTag(), at + n), FloatTag(), out + n);
      }
    } else {
      LoadFloats(from.element, from.data, index, count, out);
    }
    if (from.element != p_.operand) RoundFloats(p_.operand, out, count);
  }

  void Multiply(const Rows& a, Strips b, int64_t depth, int64_t column, bool accumulate) {
    const int64_t wanted = std::min(kDensePanel, columns_ - column);
    const DepthRuns all = {{{0, static_cast<int>(depth)}}, 1};
    for (int64_t n = 0; n < wanted; n += kPanelColumns, b.data += b.step) {
      const int vectors =
          static_cast<int>((std::min<int64_t>(kPanelColumns, wanted - n) + kLanes - 1) / kLanes);
      const RegisterTileFunction whole = ChooseTile(kTileRows, vectors);
      for (int64_t m = 0; m < rows_; m += kTileRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kTileRows, rows_ - m));
        const RegisterTileFunction tile = rows == kTileRows ? whole : ChooseTile(rows, vectors);
        tile(a.data + m * a.row, a.row, a.k, b.data, kPanelColumns, all,
             sums_ + m * kDenseColumns + column + n, kDenseColumns, accumulate);
      }
    }
  }

  void Finish() {
    alignas(64) float bias[kDenseColumns];
    if (p_.bias != nullptr) LoadFloats(p_.bias_element, p_.bias, first_column_, columns_, bias);
    for (int64_t m = 0; m < rows_; ++m) {
      float* sums = sums_ + m * kDenseColumns;
      if (p_.bias != nullptr) {
        for (int64_t n = 0; n < columns_; n += kLanes) {
          const FloatTag d;
          hn::StoreU(hn::Add(hn::LoadU(d, sums + n), hn::LoadU(d, bias + n)), d, sums + n);
        }
      }
      StoreOrAdd(sums, p_.result != DenseResult::kStore, p_.c_element, p_.c,
                 (first_row_ + m) * p_.columns + first_column_, columns_);
    }
  }

  const DenseProduct& p_;
  const int64_t first_row_, first_column_, rows_, columns_;
  float *const sums_, *const a_, *const b_;
  const TileUnit* const tiles_;
};

static_assert(kDenseColumns <= kChunk);

void RunDenseItemImpl(const DenseProduct& product, int64_t item, float* scratch) {
  DenseItem(product, item, scratch).Run();
}

// Panels of tiles follow each other as blocks of kTileSide columns do.
void PackPanelTiles([[maybe_unused]] const PanelSource& source, [[maybe_unused]] int64_t panel,
                    [[maybe_unused]] uint16_t* packed) {
#if HWY_TARGET == HWY_AVX3
  const int64_t first = panel * kDensePanel, blocks = DepthBlocks(source.depth);
  const int64_t count = std::min(kDensePanel, source.columns - first);
  uint16_t* tiles = packed + first / kTileSide * blocks * kTileWords;
  std::memset(tiles, 0, kDensePanel * blocks * kTileDepth * sizeof(uint16_t));
  for (int64_t k = 0; k < source.depth; k += kChunk) {
    const int64_t depth = std::min(kChunk, source.depth - k);
    PackTileRows(source.matrix.element, Part(source.matrix, first, k, count, depth),
                 blocks * kTileWords, tiles + k / kTileDepth * kTileWords);
  }
  TurnTiles(kDensePanel, source.depth, tiles);
#endif
}

void PackPanelImpl(const PanelSource& source, int64_t panel, ElementType operand, void* packed) {
  if (TilesFor(operand) != nullptr) {
    return PackPanelTiles(source, panel, static_cast<uint16_t*>(packed));
  }
  constexpr int64_t kStep = 16;  // of the depth: a cache line of each row of the source
  const int64_t first = panel * kDensePanel;
  const int64_t count = std::min(kDensePanel, source.columns - first);
  alignas(64) float rows[kDensePanel * kStep] = {}, turned[kPanelColumns * kStep];
  for (int64_t k = 0; k < source.depth; k += kStep) {
    const int64_t depth = std::min(kStep, source.depth - k);
    for (int64_t n = 0; n < count; ++n) {
      LoadFloats(source.matrix.element, source.matrix.data, (first + n) * source.matrix.stride + k,
                 depth, rows + n * kStep);
    }
    for (int64_t n = 0; n < kDensePanel; n += kPanelColumns) {
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        for (int64_t at = 0; at < kStep; ++at) {
          turned[at * kPanelColumns + column] = rows[(n + column) * kStep + at];
        }
      }
      StoreFloats(turned, operand, packed, (first + n) * source.depth + k * kPanelColumns,
                  depth * kPanelColumns);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(RunDenseItemImpl);
HWY_EXPORT(PackPanelImpl);

int64_t DenseItems(const DenseProduct& product) {
  return (product.rows + product.item_rows - 1) / product.item_rows *
         ((product.columns + kDenseColumns - 1) / kDenseColumns);
}

int64_t DenseItemRows(const DenseProduct& product, int threads) {
  // About 20 microseconds of one thread: less is not worth waking another.
  constexpr int64_t kFewestProducts = int64_t{1} << 22;
  const int64_t of_row = std::min(product.columns, kDenseColumns) * product.depth;
  DenseProduct cut = product;
  while (cut.item_rows > kFewestDenseRows && DenseItems(cut) < 2 * threads &&
         cut.item_rows / 2 * of_row >= kFewestProducts) {
    cut.item_rows /= 2;
  }
  return cut.item_rows;
}

void RunDenseItem(const DenseProduct& product, int64_t item, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunDenseItemImpl)(product, item, scratch);
}

void PackPanel(const PanelSource& source, int64_t panel, ElementType operand, void* packed) {
  HWY_DYNAMIC_DISPATCH(PackPanelImpl)(source, panel, operand, packed);
}

}  // namespace attnd
#endif
