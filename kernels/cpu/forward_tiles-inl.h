// S = Q·Kᵀ and O += P·V of forward on tiles of bfloat16 terms (matrix_tiles.h): the interface of
// forward_products-inl.h. Included once per Highway target, for AVX-512 only; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_FORWARD_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_FORWARD_TILES_INL_H_
#undef ATTND_KERNELS_CPU_FORWARD_TILES_INL_H_
#else
#define ATTND_KERNELS_CPU_FORWARD_TILES_INL_H_
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
class TiledForwardProducts {
 public:
  static constexpr bool kReadsWholeRows = true;
  static constexpr int kStripRows = kBlockSide;  // whose S and P stay in the first-level cache

  TiledForwardProducts(const TileUnit& unit, const Problem& p, int tiles, ScratchArena& scratch)
      : unit_(unit),
        element_(p.element),
        terms_(TermsOf(p.element)),
        dim_(static_cast<int>(p.qk_head_dim)),
        v_dim_(static_cast<int>(p.v_head_dim)),
        q_words_(PackedWords(kMaxQueryRows, dim_, terms_)) {
    q_ = scratch.Words(tiles * q_words_);
    k_ = scratch.Words(PackedWords(kMaxKeyRows, dim_, terms_));
    v_ = scratch.Words(PackedWords(v_dim_, kMaxKeyRows, terms_));
    strip_ = scratch.Words(PackedWords(kStripRows, kMaxKeyRows, kComputedTerms));
  }

  void LoadQueries(int n, const RowsOf& queries) {
    queries_[n] = queries;
    special_queries_[n].count = 0;
    PackRows(element_, queries, q_ + n * q_words_, special_queries_[n]);
  }

  void LoadKeys(const RowsOf& keys, const RowsOf& values, float*) {
    keys_ = keys;
    values_ = values;
    special_keys_.count = special_values_.count = 0;
    PackRows(element_, keys, k_, special_keys_);
    TransposeTiles(PackedWords(keys.rows, dim_, terms_), k_);
    FindSpecialRows(element_, values, special_values_);
    PackDepthRows(element_, values, special_values_, v_);
  }

  void Scores(int n, const ScoreTile& scores, int row, float* s) const {
    const Span all = scores.columns_of(row, kStripRows);
    if (all.empty()) return;
    const int rows = HWY_MIN(kStripRows, scores.rows - row);
    for (const Span& part : Within(scores.panels_of(row, kStripRows), all)) {
      MultiplyQueries(n, row, rows, TilesOf(part, kTileSide), s);
    }
    AddSpecialScores(n, scores, {row, row + rows}, s);
  }
  void AddValues(const ScoreTile& scores, int row, const float* p, float* o) const {
    const Span depth = TilesOf(scores.columns_of(row, kStripRows), kTileDepth);
    if (depth.empty()) return;
    const int64_t o_row = PaddedDim(v_dim_), a_block = (depth.end - depth.begin) * kComputedTerms;
    const int rows = HWY_MIN(kStripRows, scores.rows - row);
    for (int r = 0; r < rows; ++r) {
      PackFloatRow(p + r * kMaxKeyRows, scores.columns, depth.begin, depth.end, r % kTileSide,
                   strip_ + r / kTileSide * a_block * kTileWords);
    }
    unit_.multiply({.a = strip_,
                    .b = v_ + depth.begin * terms_ * kTileWords,
                    .a_block = a_block,
                    .b_block = int64_t{DepthBlocks(scores.columns)} * terms_,
                    .a_terms = kComputedTerms,
                    .b_terms = terms_,
                    .c = o + row * o_row,
                    .c_row = o_row,
                    .row_tiles = TileCount(rows),
                    .column_tiles = TileCount(v_dim_),
                    .k_begin = 0,
                    .k_end = depth.end - depth.begin,
                    .accumulate = true,
                    .k_wanted = uint64_t{scores.panels_of(row, kStripRows)} >> depth.begin});
    AddSpecialValues({row, row + rows}, p, o);
  }

 private:
  // S of some tiles of columns.
  void MultiplyQueries(int n, int row, int rows, const Span& columns, float* s) const {
    const int64_t block = DepthBlocks(dim_) * terms_;
    unit_.multiply({.a = q_ + n * q_words_ + row / kTileSide * block * kTileWords,
                    .b = k_ + columns.begin * block * kTileWords,
                    .a_block = block,
                    .b_block = block,
                    .a_terms = terms_,
                    .b_terms = terms_,
                    .c = s + columns.begin * kTileSide,
                    .c_row = kMaxKeyRows,
                    .row_tiles = TileCount(rows),
                    .column_tiles = columns.end - columns.begin,
                    .k_begin = 0,
                    .k_end = DepthBlocks(dim_),
                    .accumulate = false});
  }

  void AddSpecialScores(int n, const ScoreTile& scores, const Span& rows, float* s) const {
    const SpecialRows& special = special_queries_[n];
    for (int at = 0; at < special.count; ++at) {
      const int row = special.rows[at];
      if (row < rows.begin || row >= rows.end) continue;
      const FloatRow query(element_, queries_[n], row);
      for (int c = 0; c < scores.columns; ++c) {
        s[(row - rows.begin) * kMaxKeyRows + c] = Dot(query, FloatRow(element_, keys_, c), dim_);
      }
    }
    for (int at = 0; at < special_keys_.count; ++at) {
      const int column = special_keys_.rows[at];
      const FloatRow key(element_, keys_, column);
      for (int row = rows.begin; row < rows.end; ++row) {
        s[(row - rows.begin) * kMaxKeyRows + column] =
            Dot(FloatRow(element_, queries_[n], row), key, dim_);
      }
    }
  }

  void AddSpecialValues(const Span& rows, const float* p, float* o) const {
    for (int at = 0; at < special_values_.count; ++at) {
      const int column = special_values_.rows[at];
      const FloatRow value(element_, values_, column);
      for (int row = rows.begin; row < rows.end; ++row) {
        const float probability = p[(row - rows.begin) * kMaxKeyRows + column];
        if (BitsOf(probability) == BitsOf(kHiddenZero)) continue;
        AddMultiple(probability, value.at, v_dim_, o + row * PaddedDim(v_dim_));
      }
    }
  }

  const TileUnit& unit_;
  const ElementType element_;
  const int terms_, dim_, v_dim_;
  const int64_t q_words_;
  uint16_t* q_;      // [tiles] A
  uint16_t* k_;      // Kᵀ as B
  uint16_t* v_;      // V as B
  uint16_t* strip_;  // P of a strip as A
  RowsOf queries_[kMaxTilesPerItem], keys_ = {}, values_ = {};
  SpecialRows special_queries_[kMaxTilesPerItem], special_keys_, special_values_;
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
