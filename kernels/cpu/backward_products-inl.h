// The five products of backward for one tile of queries and one of keys, in float32 (gemm-inl.h).
// backward_tiles-inl.h has the same interface. Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_BACKWARD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_BACKWARD_PRODUCTS_INL_H_
#undef ATTND_KERNELS_CPU_BACKWARD_PRODUCTS_INL_H_
#else
#define ATTND_KERNELS_CPU_BACKWARD_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

class BackwardProducts {
 public:
  static constexpr bool kReadsWholeRows = false;  // of P and dS, or what their columns want

  BackwardProducts(const Problem& p, ScratchArena& scratch)
      : p_(p),
        size_(BackwardTileSize(p)),
        dim_(static_cast<int>(p.qk_head_dim)),
        v_dim_(static_cast<int>(p.v_head_dim)),
        q_stride_(PaddedDim(dim_)),
        v_stride_(PaddedDim(v_dim_)) {
    const int64_t keys = size_.kv_rows, rows = size_.q_rows;
    k_panels_ = scratch.Floats(dim_ * keys);
    v_panels_ = scratch.Floats(v_dim_ * keys);
    k_copy_ = scratch.Floats(q_stride_ * keys);
    q_copy_ = scratch.Floats(q_stride_ * rows);
    d_o_copy_ = scratch.Floats(v_stride_ * rows);
  }

  void LoadKeys(const RowsOf& keys, const RowsOf& values) {
    keys_finite_ = true;
    k_ = FloatRows(keys, k_copy_, &keys_finite_);
    TransposeToPanels(k_, q_stride_, keys.rows, dim_, k_panels_);
    // V is needed transposed only; its rows pass through the space of dO, which is read afterwards.
    CHECK(kMaxPanelColumns <= size_.q_rows);
    ForEachPanel(p_.element, values, [&](const RowsOf& some, int64_t first) {
      const float* v = FloatRows(some, d_o_copy_, &keys_finite_);
      TransposeToPanels(v, v_stride_, some.rows, v_dim_, v_panels_ + first * v_dim_);
    });
  }

  // `full`: the tile that they are for is.
  void LoadQueries(const RowsOf& queries, const RowsOf& d_o, bool full) {
    queries_finite_ = true;
    bool* finite = full ? nullptr : &queries_finite_;
    q_ = FloatRows(queries, q_copy_, finite);
    d_o_ = FloatRows(d_o, d_o_copy_, finite);
  }

  // s = Q·Kᵀ, d_p = dO·Vᵀ, both [rows][kv_rows]
  void Scores(const ScoreTile& tile, float* s, float* d_p) const {
    Product product = {.a = q_,
                       .a_row = q_stride_,
                       .a_k = 1,
                       .b = k_panels_,
                       .b_k = kPanelColumns,
                       .b_panel = int64_t{dim_} * kPanelColumns,
                       .c = s,
                       .c_row = size_.kv_rows,
                       .rows = tile.rows,
                       .columns = tile.columns,
                       .depth = dim_,
                       .accumulate = false,
                       .column_limits = tile.full ? nullptr : tile.columns_of_rows,
                       .column_panels = tile.masked ? tile.panels_of_rows : nullptr};
    Multiply(product);
    product.a = d_o_;
    product.a_row = v_stride_;
    product.b = v_panels_;
    product.b_panel = int64_t{v_dim_} * kPanelColumns;
    product.c = d_p;
    product.depth = v_dim_;
    product.depth_step = kLongDepthStep;
    Multiply(product);
  }

  // Where dK and dV of the tile of keys are added up, from zero.
  void BeginKeyGradients(ScratchArena& scratch) {
    d_k_ = scratch.Floats(size_.kv_rows * q_stride_);
    d_v_ = scratch.Floats(size_.kv_rows * v_stride_);
  }
  void ClearKeyGradients(int64_t keys) {  // of the first ones: a class may have few
    std::memset(d_k_, 0, sizeof(float) * keys * q_stride_);
    std::memset(d_v_, 0, sizeof(float) * keys * v_stride_);
  }

  // dV += (P∘Z)ᵀ·dO,  dK += dSᵀ·Q,  d_q [rows][q_stride] = dS·K; p, d_s as s and d_p of Scores,
  // kHiddenZero where not visible.
  void AddGradients(const ScoreTile& tile, const float* p, const float* d_s, float* d_q) {
    Product product = {.a = p,
                       .a_row = 1,
                       .a_k = size_.kv_rows,
                       .b = d_o_,
                       .b_k = v_stride_,
                       .b_panel = kPanelColumns,
                       .c = d_v_,
                       .c_row = v_stride_,
                       .rows = tile.columns,
                       .columns = v_dim_,
                       .depth = tile.rows,
                       .accumulate = true,
                       .depth_limits = tile.full ? nullptr : tile.rows_of_columns};
    MultiplyShown(tile, product);
    product.a = d_s;
    product.b = q_;
    product.b_k = product.c_row = q_stride_;
    product.c = d_k_;
    product.columns = dim_;
    MultiplyShown(tile, product);
    MultiplyShown(tile, {.a = d_s,
                         .a_row = size_.kv_rows,
                         .a_k = 1,
                         .b = k_,
                         .b_k = q_stride_,
                         .b_panel = kPanelColumns,
                         .c = d_q,
                         .c_row = q_stride_,
                         .rows = tile.rows,
                         .columns = dim_,
                         .depth = tile.columns,
                         .accumulate = false,
                         .depth_limits = tile.full ? nullptr : tile.columns_of_rows,
                         .depth_panels = tile.masked ? tile.panels_of_rows : nullptr,
                         .depth_step = kLongDepthStep});
  }

  // Calls body(key, row of dK, row of dV) for each of the first `keys` of the tile.
  template <class Body>
  void ForEachKey(int64_t keys, const Body& body) const {
    for (int64_t r = 0; r < keys; ++r) body(r, d_k_ + r * q_stride_, d_v_ + r * v_stride_);
  }

 private:
  // The rows as padded float32: themselves if they are, else copied. `finite`, if wanted, becomes
  // false at an infinity or NaN.
  const float* FloatRows(const RowsOf& from, float* copy, bool* finite) const {
    if (IsReadInPlace(p_, {.row = from.stride}, from.count)) {
      if (finite != nullptr) *finite = *finite && AreFinite(from);
      return static_cast<const float*>(from.data);
    }
    const bool copied = CopyRows(p_.element, from, copy, PaddedDim(from.count));
    if (finite != nullptr) *finite = *finite && copied;
    return copy;
  }

  // A masked-out key or query must not leak through 0·NaN.
  void MultiplyShown(const ScoreTile& tile, const Product& product) const {
    tile.full || (keys_finite_ && queries_finite_) ? Multiply(product) : MultiplyVisible(product);
  }

  const Problem& p_;
  const CpuTile size_;
  const int dim_, v_dim_;
  const int64_t q_stride_, v_stride_;
  float* k_panels_;  // Kᵀ and Vᵀ in panels
  float* v_panels_;
  float* k_copy_;               // [keys][q_stride]
  float* q_copy_;               // [rows][q_stride]
  float* d_o_copy_;             // [rows][v_stride]
  const float *k_, *q_, *d_o_;  // those copies, or the tensors themselves
  float *d_k_, *d_v_;           // [keys][q_stride], [keys][v_stride]
  bool keys_finite_ = true, queries_finite_ = true;
};

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
