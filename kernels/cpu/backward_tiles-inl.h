// The five products of backward on tiles of bfloat16 terms (matrix_tiles.h): the interface of
// backward_products-inl.h. dK and dV are added up transposed, dVᵀ += dOᵀ·P and dKᵀ += Qᵀ·dS: so P
// and dS are B, packed from two rows without moving lanes, and what must be transposed are the few
// tiles of dO and Q. Included once per Highway target, for AVX-512 only; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_BACKWARD_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_BACKWARD_TILES_INL_H_
#undef ATTND_KERNELS_CPU_BACKWARD_TILES_INL_H_
#else
#define ATTND_KERNELS_CPU_BACKWARD_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/matrix_tiles.h"
#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/terms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3
// A tensor's rows as A and, with depth_rows, as A of the transposed matrix or B.
struct PackedRows {
  RowsOf from = {};
  SpecialRows special;
  uint16_t* rows = nullptr;
  uint16_t* depth_rows = nullptr;
};

class TiledBackwardProducts {
 public:
  static constexpr bool kReadsWholeRows = true;

  TiledBackwardProducts(const TileUnit& unit, const Problem& p, ScratchArena& scratch)
      : unit_(unit),
        element_(p.element),
        terms_(TermsOf(p.element)),
        size_(BackwardTileSize(p)),
        dim_(static_cast<int>(p.qk_head_dim)),
        v_dim_(static_cast<int>(p.v_head_dim)) {
    const int keys = size_.kv_rows, rows = size_.q_rows;
    auto words = [&](int64_t length, int64_t depth, int terms) {
      return scratch.Words(PackedWords(length, depth, terms));
    };
    k_.rows = words(keys, dim_, terms_);
    k_.depth_rows = words(dim_, keys, terms_);
    v_.rows = words(keys, v_dim_, terms_);
    q_.rows = words(rows, dim_, terms_);
    q_.depth_rows = words(dim_, rows, terms_);
    d_o_.rows = words(rows, v_dim_, terms_);
    d_o_.depth_rows = words(v_dim_, rows, terms_);
    p_ = words(keys, rows, kComputedTerms);
    d_s_ = words(keys, rows, kComputedTerms);
    d_s_rows_ = words(rows, keys, kComputedTerms);
  }

  void LoadKeys(const RowsOf& keys, const RowsOf& values) {
    Pack(keys, k_);
    PackDepthRows(element_, keys, k_.special, k_.depth_rows);
    Pack(values, v_);
    TransposeTiles(PackedWords(keys.rows, dim_, terms_), k_.rows);
    TransposeTiles(PackedWords(values.rows, v_dim_, terms_), v_.rows);
  }

  void LoadQueries(const RowsOf& queries, const RowsOf& d_o, bool) {
    PackBoth(queries, q_);
    PackBoth(d_o, d_o_);
  }

  void Scores(const ScoreTile& tile, float* s, float* d_p) const {
    ScoresOf(tile, q_, k_, dim_, s);
    ScoresOf(tile, d_o_, v_, v_dim_, d_p);
  }

  void BeginKeyGradients(ScratchArena& scratch) {
    d_k_ = scratch.Floats(PaddedDim(dim_) * size_.kv_rows);
    d_v_ = scratch.Floats(PaddedDim(v_dim_) * size_.kv_rows);
    rows_ = scratch.Floats(kTileSide * (PaddedDim(dim_) + PaddedDim(v_dim_)));
  }
  void ClearKeyGradients(int64_t) {  // keys lie side by side: all
    std::memset(d_k_, 0, sizeof(float) * PaddedDim(dim_) * size_.kv_rows);
    std::memset(d_v_, 0, sizeof(float) * PaddedDim(v_dim_) * size_.kv_rows);
  }

  void AddGradients(const ScoreTile& tile, const float* p, const float* d_s, float* d_q) {
    special_p_.count = special_d_s_.count = 0;
    for (int row = 0; row < tile.rows; row += kBlockSide) PackBlockOfRows(tile, row, p, d_s);
    AddKeyGradient(tile, d_o_, v_dim_, p_, d_v_);
    AddKeyGradient(tile, q_, dim_, d_s_, d_k_);
    AddSpecialRows(tile, d_o_, v_dim_, special_p_, p, d_v_);
    AddSpecialRows(tile, q_, dim_, special_d_s_, d_s, d_k_);
    QueryGradient(tile, d_q);
    AddSpecialKeys(tile, d_s, d_q);
  }

  template <class Body>
  void ForEachKey(int64_t keys, const Body& body) const {
    const int64_t q_stride = PaddedDim(dim_), v_stride = PaddedDim(v_dim_);
    float* v_rows = rows_ + kTileSide * q_stride;
    for (int64_t first = 0; first < keys; first += kTileSide) {
      TransposeKeys(d_k_ + first, q_stride, rows_);
      TransposeKeys(d_v_ + first, v_stride, v_rows);
      for (int64_t r = 0; r < HWY_MIN(keys - first, int64_t{kTileSide}); ++r) {
        body(first + r, rows_ + r * q_stride, v_rows + r * v_stride);
      }
    }
  }

 private:
  void Pack(const RowsOf& from, PackedRows& to) {
    to.from = from;
    to.special.count = 0;
    PackRows(element_, from, to.rows, to.special);
  }

  void PackBoth(const RowsOf& from, PackedRows& to) {
    Pack(from, to);
    PackDepthRows(element_, from, to.special, to.depth_rows);
    TransposeTiles(PackedWords(from.count, from.rows, terms_), to.depth_rows);
  }

  void ScoresOf(const ScoreTile& tile, const PackedRows& a, const PackedRows& b, int depth,
                float* c) const {
    const int64_t block = DepthBlocks(depth) * terms_;
    TileProduct product = {.a = a.rows,
                           .b = b.rows,
                           .a_block = block,
                           .b_block = block,
                           .a_terms = terms_,
                           .b_terms = terms_,
                           .c = c,
                           .c_row = size_.kv_rows,
                           .row_tiles = TileCount(tile.rows),
                           .column_tiles = TileCount(tile.columns),
                           .k_begin = 0,
                           .k_end = DepthBlocks(depth),
                           .accumulate = false};
    tile.masked ? MultiplyPanels(tile, product) : MultiplySpans(tile, product);
    for (int n = 0; n < a.special.count; ++n) {
      const int row = a.special.rows[n];
      const FloatRow special(element_, a.from, row);
      for (int column = 0; column < tile.columns; ++column) {
        c[row * size_.kv_rows + column] = Dot(special, FloatRow(element_, b.from, column), depth);
      }
    }
    for (int n = 0; n < b.special.count; ++n) {
      const int column = b.special.rows[n];
      const FloatRow special(element_, b.from, column);
      for (int row = 0; row < tile.rows; ++row) {
        c[row * size_.kv_rows + column] = Dot(FloatRow(element_, a.from, row), special, depth);
      }
    }
  }

  void MultiplySpans(const ScoreTile& tile, TileProduct product) const {
    Span limits[kMaxQueryRows / kBlockSide];
    for (int row = 0; row < tile.rows; row += kBlockSide) {
      limits[row / kBlockSide] = TilesOf(tile.columns_of(row, kBlockSide), kTileSide);
    }
    product.column_limits = limits;
    unit_.multiply(product);
  }

  void MultiplyPanels(const ScoreTile& tile, const TileProduct& whole) const {
    for (int row = 0; row < tile.rows; row += kBlockSide) {
      const Span all = tile.columns_of(row, kBlockSide);
      for (const Span& part : Within(tile.panels_of(row, kBlockSide), all)) {
        const Span columns = TilesOf(part, kTileSide);
        TileProduct product = whole;
        product.a += row / kTileSide * whole.a_block * kTileWords;
        product.b += columns.begin * whole.b_block * kTileWords;
        product.c += row * whole.c_row + columns.begin * kTileSide;
        product.row_tiles = TileCount(HWY_MIN(kBlockSide, tile.rows - row));
        product.column_tiles = columns.end - columns.begin;
        unit_.multiply(product);
      }
    }
  }

  // kBlockSide rows of P and dS from `row`: both as B, dS as A too.
  void PackBlockOfRows(const ScoreTile& tile, int row, const float* p, const float* d_s) {
    const Span depth = TilesOf(tile.columns_of(row, kBlockSide), kTileDepth);
    for (int r = row; r < row + kTileSide; ++r) {
      PackPair(tile, r, depth, p, p_, nullptr, special_p_);
      PackPair(tile, r, depth, d_s, d_s_, d_s_rows_, special_d_s_);
    }
  }

  // Rows `row` and row + 16 as one of B and, unless `a` is null, as two of A. A row with an
  // infinity or NaN, or beyond the last, is zero there.
  void PackPair(const ScoreTile& tile, int row, const Span& depth, const float* from, uint16_t* b,
                uint16_t* a, SpecialRows& special) const {
    alignas(64) static constexpr float kZero[kMaxKeyRows] = {};
    const int other = row + kTileSide;
    const float* first = row < tile.rows ? from + row * size_.kv_rows : kZero;
    const float* second = other < tile.rows ? from + other * size_.kv_rows : kZero;
    RowWatch watch[2];
    StorePair(tile, row, depth, first, second, b, a, watch);
    const bool first_fits = watch[0].IsFinite(), second_fits = watch[1].IsFinite();
    if (first_fits && second_fits) return;
    if (!first_fits) special.Add(row);
    if (!second_fits) special.Add(other);
    StorePair(tile, row, depth, first_fits ? first : kZero, second_fits ? second : kZero, b, a,
              watch);
  }

  void StorePair(const ScoreTile& tile, int row, const Span& depth, const float* first,
                 const float* second, uint16_t* b, uint16_t* a, RowWatch* watch) const {
    constexpr int kTerms = kComputedTerms;
    const int64_t b_block = int64_t{DepthBlocks(tile.rows)} * kTerms * kTileWords;
    const int64_t a_block = int64_t{DepthBlocks(tile.columns)} * kTerms * kTileWords;
    const int r = row % kTileSide;
    b += row / kTileDepth * kTerms * kTileWords;
    if (a != nullptr) a += row / kTileSide * a_block;
    RowWatch first_watch, second_watch;
    ForEachDepthBlock(
        depth.begin, depth.end,
        tile.columns, [&](int k, const auto& load) HWY_ATTR __attribute__((always_inline)) {
          BitVector terms[2][2][kTerms];  // [row][half of the columns]
          for (int half = 0; half < 2; ++half) {
            const int column = k * kTileDepth + half * kLanes;
            const FloatVector x = load(first, column), y = load(second, column);
            first_watch.See(x);
            second_watch.See(y);
            Split<kTerms>(x, terms[0][half]);
            Split<kTerms>(y, terms[1][half]);
            StorePairs<kTerms>(terms[0][half], terms[1][half], r, b + (2 * k + half) * b_block);
          }
          if (a == nullptr) return;
          uint16_t* place = a + k * kTerms * kTileWords;
          StorePairs<kTerms>(terms[0][0], terms[0][1], r, place);
          StorePairs<kTerms>(terms[1][0], terms[1][1], r, place + a_block);
        });
    watch[0] = first_watch;
    watch[1] = second_watch;
  }

  // sum [dim][kv_rows] += Aᵀ·B, where any row of a block sees any key of it.
  void AddKeyGradient(const ScoreTile& tile, const PackedRows& a, int dim, const uint16_t* b,
                      float* sum) const {
    const int blocks = DepthBlocks(tile.rows), tiles = TileCount(tile.columns);
    TileProduct product = {.a = a.depth_rows,
                           .b = b,
                           .a_block = int64_t{blocks} * terms_,
                           .b_block = int64_t{blocks} * kComputedTerms,
                           .a_terms = terms_,
                           .b_terms = kComputedTerms,
                           .c = sum,
                           .c_row = size_.kv_rows,
                           .row_tiles = TileCount(dim),
                           .column_tiles = tiles,
                           .k_begin = 0,
                           .k_end = blocks,
                           .accumulate = true};
    if (tile.full) return unit_.multiply(product);
    for (int column = 0; column < tiles; column += 2) {
      const Span rows = RowBlocksThatSee(tile, column * kTileSide);
      if (rows.empty()) continue;
      product.b = b + column * product.b_block * kTileWords;
      product.c = sum + column * kTileSide;
      product.column_tiles = HWY_MIN(2, tiles - column);
      product.k_begin = rows.begin;
      product.k_end = rows.end;
      unit_.multiply(product);
    }
  }

  // Blocks of rows that see a key of the block from `column`, and those between.
  static Span RowBlocksThatSee(const ScoreTile& tile, int column) {
    Span blocks;
    for (int n = 0; n * kBlockSide < tile.rows; ++n) {
      const Span seen = TilesOf(tile.columns_of(n * kBlockSide, kBlockSide), kBlockSide);
      const int at = column / kBlockSide;
      const uint32_t panels = tile.panels_of(n * kBlockSide, kBlockSide);
      if ((panels >> (column / kSkipKeys) & 1) == 0) continue;
      if (seen.begin <= at && at < seen.end) blocks = Union(blocks, {n, n + 1});
    }
    return blocks;
  }

  void QueryGradient(const ScoreTile& tile, float* d_q) const {
    const int blocks = DepthBlocks(tile.columns);
    const int64_t stride = PaddedDim(dim_);
    TileProduct product = {.a = d_s_rows_,
                           .b = k_.depth_rows,
                           .a_block = int64_t{blocks} * kComputedTerms,
                           .b_block = int64_t{blocks} * terms_,
                           .a_terms = kComputedTerms,
                           .b_terms = terms_,
                           .c = d_q,
                           .c_row = stride,
                           .row_tiles = TileCount(tile.rows),
                           .column_tiles = TileCount(dim_),
                           .k_begin = 0,
                           .k_end = blocks,
                           .accumulate = false};
    if (tile.full) return unit_.multiply(product);
    for (int row = 0; row < tile.rows; row += kBlockSide) {
      const Span depth = TilesOf(tile.columns_of(row, kBlockSide), kTileDepth);
      product.a = d_s_rows_ + row / kTileSide * product.a_block * kTileWords;
      product.c = d_q + row * stride;
      product.row_tiles = TileCount(HWY_MIN(kBlockSide, tile.rows - row));
      product.k_begin = depth.begin;
      product.k_end = depth.end;
      product.k_wanted = tile.panels_of(row, kBlockSide);
      unit_.multiply(product);
    }
  }

  // Adds what the tiles left out of dV or dK: rows of dO or Q, or of P or dS, that are special.
  void AddSpecialRows(const ScoreTile& tile, const PackedRows& rows, int dim,
                      const SpecialRows& special, const float* factors, float* sum) const {
    for (int n = 0; n < rows.special.count; ++n) {
      AddSpecialRow(tile, rows, rows.special.rows[n], dim, factors, sum);
    }
    for (int n = 0; n < special.count; ++n) {
      if (rows.special.Contains(special.rows[n])) continue;
      AddSpecialRow(tile, rows, special.rows[n], dim, factors, sum);
    }
  }

  void AddSpecialRow(const ScoreTile& tile, const PackedRows& rows, int row, int dim,
                     const float* factors, float* sum) const {
    const FloatRow numbers(element_, rows.from, row);
    for (int column = 0; column < tile.columns; ++column) {
      const float factor = factors[row * size_.kv_rows + column];
      if (IsHidden(tile, factor)) continue;
      for (int d = 0; d < dim; ++d) sum[d * size_.kv_rows + column] += factor * numbers.at[d];
    }
  }

  void AddSpecialKeys(const ScoreTile& tile, const float* d_s, float* d_q) const {
    const int64_t stride = PaddedDim(dim_);
    auto add = [&](int row, int column, const FloatRow& key) {
      const float factor = d_s[row * size_.kv_rows + column];
      if (!IsHidden(tile, factor)) AddMultiple(factor, key.at, dim_, d_q + row * stride);
    };
    for (int n = 0; n < k_.special.count; ++n) {
      const int column = k_.special.rows[n];
      const FloatRow key(element_, k_.from, column);
      for (int row = 0; row < tile.rows; ++row) {
        if (!special_d_s_.Contains(row)) add(row, column, key);
      }
    }
    for (int n = 0; n < special_d_s_.count; ++n) {
      for (int c = 0; c < tile.columns; ++c) {
        add(special_d_s_.rows[n], c, FloatRow(element_, k_.from, c));
      }
    }
  }

  static bool IsHidden(const ScoreTile& tile, float factor) {
    return !tile.full && BitsOf(factor) == BitsOf(kHiddenZero);
  }

  // Columns of [stride][kv_rows] to rows of [kTileSide][stride].
  void TransposeKeys(const float* from, int64_t stride, float* to) const {
    for (int64_t d = 0; d < stride; d += kTileSide) {
      TransposeTile(from + d * size_.kv_rows, size_.kv_rows, to + d, stride);
    }
  }

  const TileUnit& unit_;
  const ElementType element_;
  const int terms_;
  const CpuTile size_;
  const int dim_, v_dim_;
  PackedRows k_, v_;    // rows: Kᵀ and Vᵀ as B; depth_rows: K as B
  PackedRows q_, d_o_;  // rows: as A; depth_rows: Qᵀ and dOᵀ as A
  uint16_t *p_, *d_s_;  // as B
  uint16_t* d_s_rows_;  // dS as A
  SpecialRows special_p_, special_d_s_;
  float *d_k_, *d_v_;  // dKᵀ and dVᵀ, [dim][kv_rows]
  float* rows_;        // some rows of dK and dV
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
