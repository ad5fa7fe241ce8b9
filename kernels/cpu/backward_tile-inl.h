// BackwardTile: P and dS of one tile of queries against one tile of keys, recomputed from lse.
//   S = scale·Q·Kᵀ, masked   P = exp(S − lse)   dP = (dO·Vᵀ)∘Z   dS = P∘(dP − delta)·(1 − tanh²)
// Used by the gradients of Q, K, V and of the bias. Scratch: see Layout; one thread.
// Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#undef ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#else
#define ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <optional>

#include "base/check.h"
#include "kernels/backend.h"
#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

class BackwardTile {
 public:
  BackwardTile(const BackwardCall& call, float* scratch)
      : call_(call),
        p_(*call.problem),
        work_(p_, call.workspace),
        size_(BackwardTileSize(p_)),
        dim_(static_cast<int>(p_.qk_head_dim)),
        v_dim_(static_cast<int>(p_.v_head_dim)),
        q_stride_(PaddedDim(dim_)),
        v_stride_(PaddedDim(v_dim_)) {
    Layout(scratch);
  }

  // Points at a tile. False, and nothing is read, if no query of it sees a key of it.
  bool Select(int64_t b, int64_t h, int64_t q_tile, int64_t kv_tile) {
    rules_.emplace(call_, b, h);
    const Sequence& s = rules_->sequence;
    tile_.first_row = q_tile * size_.q_rows;
    tile_.first_column = kv_tile * size_.kv_rows;
    tile_.rows = static_cast<int>(HWY_MIN(s.q_len - tile_.first_row, int64_t{size_.q_rows}));
    tile_.columns =
        static_cast<int>(HWY_MIN(s.kv_len - tile_.first_column, int64_t{size_.kv_rows}));
    return tile_.rows > 0 && tile_.columns > 0 && FindSpans(*rules_, tile_);
  }

  // Fills P∘Z and dS of the selected tile. With `for_bias`, dS is the bias's gradient: without the
  // softcap's factor.
  void Compute(bool for_bias) {
    LoadKeys();
    LoadQueries();
    for_bias_ = for_bias;
    Scores();
    const bool dropout = p_.dropout.threshold > 0;
    if (dropout) FillDropout(*rules_, tile_, keep_, size_.kv_rows);
    if (tile_.full) {
      dropout ? Rows<false, true>() : Rows<false, false>();
    } else {
      dropout ? Rows<true, true>() : Rows<true, false>();
    }
  }

  const HeadRules& rules() const { return *rules_; }
  const ScoreTile& tile() const { return tile_; }
  const CpuTile& size() const { return size_; }
  const float* d_s() const { return d_s_; }

  // d_v [keys][v_stride] += (P∘Z)ᵀ·dO,  d_k [keys][q_stride] += dSᵀ·Q,  d_q [rows][q_stride] = dS·K
  void AddKeyGradients(float* d_k, float* d_v) const {
    Product product = {.a = s_,
                       .a_row = 1,
                       .a_k = size_.kv_rows,
                       .b = d_o_,
                       .b_k = v_stride_,
                       .b_panel = kPanelColumns,
                       .c = d_v,
                       .c_row = v_stride_,
                       .rows = tile_.columns,
                       .columns = v_dim_,
                       .depth = tile_.rows,
                       .accumulate = true,
                       .depth_limits = tile_.full ? nullptr : tile_.rows_of_columns};
    Finite() ? Multiply(product) : MultiplyVisible(product);
    product.a = d_s_;
    product.b = q_;
    product.b_k = product.c_row = q_stride_;
    product.c = d_k;
    product.columns = dim_;
    Finite() ? Multiply(product) : MultiplyVisible(product);
  }

  void QueryGradient(float* d_q) const {
    Product product = {.a = d_s_,
                       .a_row = size_.kv_rows,
                       .a_k = 1,
                       .b = k_,
                       .b_k = q_stride_,
                       .b_panel = kPanelColumns,
                       .c = d_q,
                       .c_row = q_stride_,
                       .rows = tile_.rows,
                       .columns = dim_,
                       .depth = tile_.columns,
                       .accumulate = false,
                       .depth_limits = tile_.full ? nullptr : tile_.columns_of_rows,
                       .depth_step = kLongDepthStep};
    Finite() ? Multiply(product) : MultiplyVisible(product);
  }

  // Scratch that the owner may use: what lies beyond the tile's own.
  float* rest() const { return rest_; }
  float* end() const { return end_; }

 private:
  void Layout(float* scratch) {
    end_ = scratch + kScratchFloats;
    auto take = [&](int64_t floats) {
      float* place = scratch;
      scratch += RoundUp(floats, kMaxLanes);
      return place;
    };
    const int64_t keys = size_.kv_rows, rows = size_.q_rows;
    k_panels_ = take(dim_ * keys);
    v_panels_ = take(v_dim_ * keys);
    k_copy_ = take(q_stride_ * keys);
    q_copy_ = take(q_stride_ * rows);
    d_o_copy_ = take(v_stride_ * rows);
    s_ = take(rows * keys);
    d_s_ = take(rows * keys);
    slope_factor_ = take(rows * keys);
    keep_ = reinterpret_cast<uint8_t*>(take(rows * keys / 4));
    rest_ = scratch;
    CHECK(rest_ <= end_);
  }

  RowsOf RowsAt(const void* data, const TensorStrides& strides, int64_t head, int64_t row, int rows,
                int count) const {
    const int64_t at = strides.Row(rules_->batch_index, head, row) * ElementBytes(p_.element);
    return {static_cast<const uint8_t*>(data) + at, strides.row, rows, count};
  }

  void LoadKeys() {
    const int64_t head = p_.KvHead(rules_->q_head);
    const int64_t identity[3] = {rules_->batch_index, head, tile_.first_column};
    if (std::equal(identity, identity + 3, loaded_)) return;
    std::copy(identity, identity + 3, loaded_);
    const int64_t row = rules_->sequence.kv_begin + tile_.first_column;
    const RowsOf keys = RowsAt(call_.k, KeyStrides(p_), head, row, tile_.columns, dim_);
    keys_finite_ = true;
    k_ = FloatRows(keys, k_copy_, &keys_finite_);
    TransposeToPanels(k_, q_stride_, tile_.columns, dim_, k_panels_);
    // V is needed transposed only; its rows pass through the space of dO, which is read afterwards.
    constexpr int kStep = kMaxPanelColumns;
    CHECK(kStep <= size_.q_rows);
    for (int r = 0; r < tile_.columns; r += kStep) {
      const int count = HWY_MIN(kStep, tile_.columns - r);
      const RowsOf values = RowsAt(call_.v, ValueStrides(p_), head, row + r, count, v_dim_);
      const float* v = FloatRows(values, d_o_copy_, &keys_finite_);
      TransposeToPanels(v, v_stride_, count, v_dim_, v_panels_ + int64_t{r} * v_dim_);
    }
  }

  void LoadQueries() {
    const int64_t row = rules_->sequence.q_begin + tile_.first_row, head = rules_->q_head;
    queries_finite_ = true;
    bool* finite = tile_.full ? nullptr : &queries_finite_;
    q_ = FloatRows(RowsAt(call_.q, QueryStrides(p_), head, row, tile_.rows, dim_), q_copy_, finite);
    d_o_ = FloatRows(RowsAt(call_.d_o, OutputStrides(p_), head, row, tile_.rows, v_dim_), d_o_copy_,
                     finite);
  }

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
  bool Finite() const { return tile_.full || (keys_finite_ && queries_finite_); }

  void Scores() {
    Product product = {.a = q_,
                       .a_row = q_stride_,
                       .a_k = 1,
                       .b = k_panels_,
                       .b_k = kPanelColumns,
                       .b_panel = int64_t{dim_} * kPanelColumns,
                       .c = s_,
                       .c_row = size_.kv_rows,
                       .rows = tile_.rows,
                       .columns = tile_.columns,
                       .depth = dim_,
                       .accumulate = false,
                       .column_limits = tile_.full ? nullptr : tile_.columns_of_rows};
    Multiply(product);
    product.a = d_o_;
    product.a_row = v_stride_;
    product.b = v_panels_;
    product.b_panel = int64_t{v_dim_} * kPanelColumns;
    product.c = d_s_;
    product.depth = v_dim_;
    product.depth_step = kLongDepthStep;
    Multiply(product);
  }

  // S → P∘Z and dP → dS in place.
  template <bool kMasked, bool kDropout>
  void Rows() {
    for (int r = 0; r < tile_.rows; ++r) {
      float* s = s_ + r * size_.kv_rows;
      float* d_s = d_s_ + r * size_.kv_rows;
      float* slope_factor = SlopeFactor(r);
      if (kMasked || !rules_->plain) PrepareRow(*rules_, tile_, r, s, slope_factor);
      const Span whole = WholeVectors(tile_.row(r));
      GradientRow<kMasked, kDropout>(r, whole);
      if (slope_factor != nullptr) MultiplyRow(slope_factor, whole, d_s);
      if (kMasked) {
        for (float* row : {s, d_s}) {
          FillHidden(row, 0, whole.begin);
          FillHidden(row, whole.end, tile_.columns);
        }
      }
    }
  }

  float* SlopeFactor(int r) const {
    return p_.softcap > 0 && !for_bias_ ? slope_factor_ + r * size_.kv_rows : nullptr;
  }

  static void MultiplyRow(const float* factor, const Span& whole, float* row) {
    const FloatTag d;
    for (int c = whole.begin; c < whole.end; c += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, factor + c), hn::LoadU(d, row + c)), d, row + c);
    }
  }

  template <bool kMasked, bool kDropout>
  void GradientRow(int r, const Span& whole) {
    const FloatTag d;
    const int64_t at =
        p_.LseIndex(rules_->batch_index, rules_->q_head, rules_->sequence, tile_.first_row + r);
    const FloatVector factor = hn::Set(d, rules_->factor());
    const FloatVector lse = hn::Set(d, call_.lse[at]);
    const FloatVector delta = hn::Set(d, work_.delta()[at]);
    const FloatVector kept = hn::Set(d, DropoutScale(p_.dropout.threshold));
    float* s = s_ + r * size_.kv_rows;
    float* d_s = d_s_ + r * size_.kv_rows;
    const uint8_t* keep = keep_ + r * size_.kv_rows;
    for (int c = whole.begin; c < whole.end; c += kLanes) {
      FloatVector score = hn::LoadU(d, s + c);
      // The difference first: rounding lse·log2 e would cost P more than the product does here.
      FloatVector exponent = hn::MulSub(score, factor, lse);
      FloatVector probability = Exp2(hn::Mul(exponent, hn::Set(d, kLog2E)));
      FloatVector d_p = hn::LoadU(d, d_s + c);
      FloatVector dropped = probability;
      if (kDropout) {
        FloatVector z = hn::IfThenElseZero(Kept(keep + c, p_.dropout.threshold), kept);
        d_p = hn::Mul(d_p, z);
        dropped = hn::Mul(probability, z);
      }
      FloatVector gradient = hn::Mul(probability, hn::Sub(d_p, delta));
      if (kMasked) {
        auto hidden = hn::Eq(score, hn::Set(d, kHidden));
        const FloatVector zero = hn::Set(d, kHiddenZero);
        dropped = hn::IfThenElse(hidden, zero, dropped);
        // Adding +0 turns a visible −0 into +0.
        gradient = hn::IfThenElse(hidden, zero, hn::Add(gradient, hn::Zero(d)));
      }
      hn::StoreU(dropped, d, s + c);
      hn::StoreU(gradient, d, d_s + c);
    }
  }

  const BackwardCall& call_;
  const Problem& p_;
  const BackwardWorkspace work_;
  const CpuTile size_;
  const int dim_, v_dim_;
  const int64_t q_stride_, v_stride_;
  float* k_panels_;  // Kᵀ and Vᵀ in panels
  float* v_panels_;
  float* k_copy_;               // [keys][q_stride]
  float* q_copy_;               // [rows][q_stride]
  float* d_o_copy_;             // [rows][v_stride]
  const float *k_, *q_, *d_o_;  // those copies, or the tensors themselves
  float* s_;                    // [rows][keys]: S, then P∘Z
  float* d_s_;                  // [rows][keys]: dP, then dS
  float* slope_factor_;         // [rows][keys], with softcap
  uint8_t* keep_;               // [rows][keys], with dropout
  float *rest_, *end_;
  std::optional<HeadRules> rules_;
  ScoreTile tile_;
  int64_t loaded_[3] = {-1, -1, -1};  // batch entry, KV head, first key of what k_ and panels hold
  bool keys_finite_ = true, queries_finite_ = true, for_bias_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
