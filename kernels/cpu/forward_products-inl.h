// S = Q·Kᵀ and O += P·V of forward in float32 (gemm-inl.h). forward_tiles-inl.h has the same
// interface. Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_FORWARD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_FORWARD_PRODUCTS_INL_H_
#undef ATTND_KERNELS_CPU_FORWARD_PRODUCTS_INL_H_
#else
#define ATTND_KERNELS_CPU_FORWARD_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// `rows` rows from `first` of a tensor of Problem::element, `count` elements each.
inline RowsOf RowsAt(const Problem& p, const void* data, const TensorStrides& strides,
                     int64_t first, int rows, int64_t count) {
  return {static_cast<const uint8_t*>(data) + first * ElementBytes(p.element), strides.row, rows,
          static_cast<int>(count)};
}

struct FloatRows {
  const float* data;
  int64_t stride;
};

// Rows as float32: where they lie, or copied with padding. Enough for reading number by number.
inline FloatRows AsFloats(ElementType element, const RowsOf& from, float* copy) {
  if (element == ElementType::kFloat32) {
    return {static_cast<const float*>(from.data), from.stride};
  }
  CopyRows(element, from, copy, PaddedDim(from.count));
  return {copy, PaddedDim(from.count)};
}

// Rows of Q this far apart fall into a few sets of a first-level cache and push each other out
// while panels of K pass by: they are copied together.
constexpr int64_t kFarFloats = 1024;

// K into panels, [keys / kPanelColumns][dim][kPanelColumns] from `panels` on. Through `spare`,
// which has room for kMaxPanelColumns rows, where they are not float32.
inline void PackKeys(ElementType element, const RowsOf& keys, float* spare, float* panels) {
  ForEachPanel(element, keys, [&](const RowsOf& some, int64_t first) {
    const FloatRows k = AsFloats(element, some, spare);
    TransposeToPanels(k.data, k.stride, some.rows, some.count, panels + first * some.count);
  });
}

// S = Q·Kᵀ of a tile, K in panels: s [rows][kMaxKeyRows], where any row sees the columns.
inline void ScoresOfRows(const FloatRows& q, const float* panels, int dim, const ScoreTile& scores,
                         float* s) {
  Multiply({.a = q.data,
            .a_row = q.stride,
            .a_k = 1,
            .b = panels,
            .b_k = kPanelColumns,
            .b_panel = int64_t{dim} * kPanelColumns,
            .c = s,
            .c_row = kMaxKeyRows,
            .rows = scores.rows,
            .columns = scores.columns,
            .depth = dim,
            .accumulate = false,
            .column_limits = scores.full ? nullptr : scores.columns_of_rows,
            .column_panels = scores.masked ? scores.panels_of_rows : nullptr,
            .depth_step = kLongDepthStep});
}

// ForwardProducts: of one item. K is brought into panels, or where queries are few left as rows.
class ForwardProducts {
 public:
  static constexpr int kStripRows = kMaxQueryRows;  // of S in work at a time
  static constexpr bool kReadsWholeRows = false;    // of P, or what its rows want

  ForwardProducts(const Problem& p, int64_t q_len, int tiles, ScratchArena& scratch)
      : p_(p),
        few_(HasFewQueries(p, q_len)),
        dim_(static_cast<int>(p.qk_head_dim)),
        v_dim_(static_cast<int>(p.v_head_dim)),
        q_stride_(PaddedDim(dim_)),
        v_stride_(PaddedDim(v_dim_)) {
    q_copies_ = scratch.Floats(tiles * kMaxQueryRows * q_stride_);
    k_ = scratch.Floats(kMaxKeyRows * q_stride_);
    v_copy_ = scratch.Floats(kMaxKeyRows * v_stride_);
    s_transposed_ = scratch.Floats(kMaxKeyRows * kFewQueries);
  }

  // Loads the queries of the item's tile `n`.
  void LoadQueries(int n, const RowsOf& queries) {
    QueryTile& tile = tiles_[n];
    float* copy = q_copies_ + n * kMaxQueryRows * q_stride_;
    tile.panels = copy;
    if (few_) copy += kMaxPanelColumns * q_stride_;
    if (queries.stride >= kFarFloats) {
      CopyRows(p_.element, queries, copy, q_stride_);
      tile.q = {copy, q_stride_};
    } else {
      tile.q = AsFloats(p_.element, queries, copy);
    }
    if (few_) TransposeToPanels(tile.q.data, tile.q.stride, queries.rows, dim_, tile.panels);
  }

  // Brings K into panels, or with few queries into float rows, and V into float rows. `spare` has
  // room for kMaxPanelColumns rows: where K is packed and not float32 they pass through it.
  void LoadKeys(const RowsOf& keys, const RowsOf& values, float* spare) {
    keys_ = few_ ? AsFloats(p_.element, keys, k_) : FloatRows{k_, 0};
    if (!few_) PackKeys(p_.element, keys, spare, k_);
    values_ = static_cast<const float*>(values.data);
    finite_ = Finite::kUnknown;
    if (IsReadInPlace(p_, {.row = values.stride}, v_dim_)) return;
    values_ = v_copy_;
    finite_ = CopyRows(p_.element, values, v_copy_, v_stride_) ? Finite::kYes : Finite::kNo;
  }

  // Computes a strip of rows from `row`: s [kStripRows][kMaxKeyRows].
  void Scores(int n, const ScoreTile& scores, int, float* s) {
    few_ ? ScoresOfFew(tiles_[n], scores, s) : ScoresOfRows(tiles_[n].q, k_, dim_, scores, s);
  }

  // Adds the strip's P·V to o [rows of the tile][v_stride]; p as s, kHiddenZero where not visible.
  void AddValues(const ScoreTile& scores, int, const float* p, float* o) {
    Product product = {.a = p,
                       .a_row = kMaxKeyRows,
                       .a_k = 1,
                       .b = values_,
                       .b_k = v_stride_,
                       .b_panel = kPanelColumns,
                       .c = o,
                       .c_row = v_stride_,
                       .rows = scores.rows,
                       .columns = v_dim_,
                       .depth = scores.columns,
                       .accumulate = true,
                       .depth_limits = scores.full ? nullptr : scores.columns_of_rows,
                       .depth_panels = scores.masked ? scores.panels_of_rows : nullptr,
                       .depth_step = kLongDepthStep};
    scores.full || AreValuesFinite(scores.columns) ? Multiply(product) : MultiplyVisible(product);
  }

 private:
  struct QueryTile {
    FloatRows q;    // Q itself, or its copy
    float* panels;  // Qᵀ, for few queries
  };

  // Sᵀ = K·Qᵀ, turned around.
  void ScoresOfFew(const QueryTile& tile, const ScoreTile& scores, float* s) const {
    Multiply({.a = keys_.data,
              .a_row = keys_.stride,
              .a_k = 1,
              .b = tile.panels,
              .b_k = kPanelColumns,
              .b_panel = int64_t{dim_} * kPanelColumns,
              .c = s_transposed_,
              .c_row = kFewQueries,
              .rows = scores.columns,
              .columns = scores.rows,
              .depth = dim_,
              .accumulate = false,
              .depth_step = kLongDepthStep});
    for (int r = 0; r < scores.rows; ++r) {
      for (int c = 0; c < scores.columns; ++c) {
        s[r * kMaxKeyRows + c] = s_transposed_[c * kFewQueries + r];
      }
    }
  }

  // Looked for once a tile of keys, where a query tile sees some of them only.
  bool AreValuesFinite(int keys) {
    if (finite_ == Finite::kUnknown) {
      const bool finite = AreFinite({values_, v_stride_, keys, v_dim_});
      finite_ = finite ? Finite::kYes : Finite::kNo;
    }
    return finite_ == Finite::kYes;
  }

  enum class Finite : uint8_t { kUnknown, kYes, kNo };

  const Problem& p_;
  const bool few_;  // K is not packed
  const int dim_, v_dim_;
  const int64_t q_stride_, v_stride_;
  QueryTile tiles_[kMaxTilesPerItem];
  float* q_copies_;      // [tiles][kMaxQueryRows][q_stride]: Q unless it is float32, or panels
  float* k_;             // K in panels; as rows [keys][q_stride] with few queries
  float* v_copy_;        // [keys][v_stride], unless V is read in place
  float* s_transposed_;  // [keys][kFewQueries], with few queries
  // These belong to the tile of keys in work.
  FloatRows keys_ = {};            // with few queries
  const float* values_ = nullptr;  // [keys][v_stride]
  Finite finite_ = Finite::kUnknown;
};

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
