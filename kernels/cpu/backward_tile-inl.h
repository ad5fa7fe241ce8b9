// BackwardTile: P and dS of one tile of queries against one tile of keys, recomputed from lse.
//   S = scale·Q·Kᵀ, masked   P = exp(S − lse)   dP = (dO·Vᵀ)∘Z   dS = P∘(dP − delta)·(1 − tanh²)
// Used by the gradients of Q, K, V and of the bias. `Products` is BackwardProducts or what has its
// interface. One thread.
// Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#undef ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#else
#define ATTND_KERNELS_CPU_BACKWARD_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <optional>

#include "kernels/backend.h"
#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Products>
class BackwardTile {
 public:
  BackwardTile(const CpuBackwardCall& call, int64_t residue, Products& products,
               ScratchArena& scratch)
      : call_(call),
        residue_(residue),
        p_(*call.problem),
        work_(p_, call.workspace),
        size_(BackwardTileSize(p_)),
        products_(products) {
    const int64_t pairs = int64_t{size_.q_rows} * size_.kv_rows;
    s_ = scratch.Floats(pairs);
    d_s_ = scratch.Floats(pairs);
    slope_factor_ = scratch.Floats(pairs);
    keep_ = scratch.Bytes(pairs);
  }

  // Points at a tile. False, and nothing is read, if no query of it sees a key of it.
  bool Select(int64_t b, int64_t h, int64_t q_tile, int64_t kv_tile) {
    rules_.emplace(call_, b, h, residue_);
    const Sequence& s = rules_->sequence;
    tile_.first_row = q_tile * size_.q_rows;
    tile_.first_column = kv_tile * size_.kv_rows;
    tile_.rows = static_cast<int>(HWY_MIN(s.q_len - tile_.first_row, int64_t{size_.q_rows}));
    tile_.columns =
        static_cast<int>(HWY_MIN(s.kv_len - tile_.first_column, int64_t{size_.kv_rows}));
    if (tile_.rows <= 0 || tile_.columns <= 0 || !FindSpans(*rules_, tile_)) return false;
    if (!tile_.full) FindRowsOfColumns(tile_);
    return true;
  }

  // Fills P∘Z and dS of the selected tile. With `for_bias`, dS is the bias's gradient: without the
  // softcap's factor.
  void Compute(bool for_bias) {
    LoadKeys();
    LoadQueries();
    for_bias_ = for_bias;
    products_.Scores(tile_, s_, d_s_);
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

  // Adds to dK and dV of the tile's keys; d_q [rows][q_stride] = dS·K.
  void AddGradients(float* d_q) { products_.AddGradients(tile_, s_, d_s_, d_q); }

 private:
  RowsOf RowsAt(const void* data, const TensorStrides& strides, int64_t head, int64_t row, int rows,
                int64_t count) const {
    const int64_t at = strides.Row(rules_->batch_index, head, row) * ElementBytes(p_.element);
    return {static_cast<const uint8_t*>(data) + at, rules_->rows.Stepping(strides).row, rows,
            static_cast<int>(count)};
  }

  void LoadKeys() {
    const int64_t head = p_.KvHead(rules_->q_head);
    const int64_t identity[3] = {rules_->batch_index, head, tile_.first_column};
    if (std::equal(identity, identity + 3, loaded_)) return;
    std::copy(identity, identity + 3, loaded_);
    const int64_t row = rules_->rows.KeyRow(tile_.first_column);
    products_.LoadKeys(RowsAt(call_.k, KeyStrides(p_), head, row, tile_.columns, p_.qk_head_dim),
                       RowsAt(call_.v, ValueStrides(p_), head, row, tile_.columns, p_.v_head_dim));
  }

  void LoadQueries() {
    const int64_t row = rules_->rows.QueryRow(tile_.first_row), head = rules_->q_head;
    products_.LoadQueries(
        RowsAt(call_.q, QueryStrides(p_), head, row, tile_.rows, p_.qk_head_dim),
        RowsAt(call_.d_o, OutputStrides(p_), head, row, tile_.rows, p_.v_head_dim), tile_.full);
  }

  // S → P∘Z and dP → dS in place.
  template <bool kMasked, bool kDropout>
  void Rows() {
    const Stretches read =
        for_bias_ || Products::kReadsWholeRows ? tile_.WholeRow() : tile_.WantedByColumns();
    for (int r = 0; r < tile_.rows; ++r) {
      float* s = s_ + r * size_.kv_rows;
      float* d_s = d_s_ + r * size_.kv_rows;
      float* slope_factor = SlopeFactor(r);
      if (kMasked || !rules_->plain) PrepareRow(*rules_, tile_, r, s, slope_factor);
      for (const Span& part : StretchesOf(tile_, r)) {
        if (part.empty()) continue;
        GradientRow<kMasked, kDropout>(r, part);
        if (slope_factor != nullptr) MultiplyRow(slope_factor, part, d_s);
      }
      if (!kMasked) continue;
      for (float* row : {s, d_s}) FillUnseen(tile_, r, read, row);
    }
  }

  float* SlopeFactor(int r) const {
    return p_.softcap > 0 && !for_bias_ ? slope_factor_ + r * size_.kv_rows : nullptr;
  }

  // A zero stays what it was, kHiddenZero or a visible +0, and none becomes kHiddenZero.
  static void MultiplyRow(const float* factor, const Span& whole, float* row) {
    const FloatTag d;
    const FloatVector zero = hn::Zero(d);
    for (int c = whole.begin; c < whole.end; c += kLanes) {
      const FloatVector value = hn::LoadU(d, row + c);
      const FloatVector product = hn::MulAdd(hn::LoadU(d, factor + c), value, zero);
      hn::StoreU(hn::IfThenElse(hn::Eq(value, zero), value, product), d, row + c);
    }
  }

  template <bool kMasked, bool kDropout>
  void GradientRow(int r, const Span& whole) {
    const FloatTag d;
    const int64_t at =
        rules_->rows.LseIndex(p_, rules_->batch_index, rules_->q_head, tile_.first_row + r);
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

  const CpuBackwardCall& call_;
  const int64_t residue_;
  const Problem& p_;
  const BackwardWorkspace work_;
  const CpuTile size_;
  Products& products_;
  float* s_;             // [rows][keys]: S, then P∘Z
  float* d_s_;           // [rows][keys]: dP, then dS
  float* slope_factor_;  // [rows][keys], with softcap
  uint8_t* keep_;        // [rows][keys], with dropout
  std::optional<HeadRules> rules_;
  ScoreTile tile_;
  int64_t loaded_[3] = {-1, -1, -1};  // batch entry, KV head, first key of what products_ holds
  bool for_bias_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
