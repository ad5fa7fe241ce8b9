// One tile of the averaged attention map (attention/patterns/captured_map.h): of each batch entry
// and query head, in that order, S = Q·Kᵀ, masked, and P = exp(f·S − lse) is added to the tile in
// float32.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/capture.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/forward_products-inl.h"
#include "kernels/cpu/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

class TileCapture {
 public:
  TileCapture(const CpuForwardCall& call, const MapTile& tile, ScratchArena& scratch)
      : call_(call),
        p_(*call.problem),
        tile_(tile),
        dim_(static_cast<int>(p_.qk_head_dim)),
        q_(scratch.Floats(kMaxQueryRows * PaddedDim(dim_))),
        k_(scratch.Floats(kMaxKeyRows * PaddedDim(dim_))),
        s_(scratch.Floats(kMaxQueryRows * kMaxKeyRows)) {}

  // sums [kMaxQueryRows][kMaxKeyRows]
  void AddAll(float* sums) {
    for (int64_t b = 0; b < p_.batch && !call_.stop.stop_requested(); ++b) {
      for (int64_t kv_head = 0; kv_head < p_.kv_heads; ++kv_head) {
        loaded_ = false;
        for (int64_t n = 0; n < p_.group_size(); ++n) {
          AddHead(HeadRules(call_, b, kv_head * p_.group_size() + n, 0), kv_head, sums);
        }
      }
    }
  }

 private:
  void AddHead(const HeadRules& rules, int64_t kv_head, float* sums) {
    const Sequence& sequence = rules.sequence;
    scores_.first_row = tile_.row;
    scores_.first_column = tile_.key;
    scores_.rows = static_cast<int>(HWY_MIN(sequence.q_len - tile_.row, int64_t{kMaxQueryRows}));
    scores_.columns = static_cast<int>(HWY_MIN(sequence.kv_len - tile_.key, int64_t{kMaxKeyRows}));
    if (scores_.rows <= 0 || scores_.columns <= 0 || !FindSpans(rules, scores_)) return;
    if (!loaded_) LoadKeys(rules, kv_head);
    loaded_ = true;
    const TensorStrides strides = QueryStrides(p_);
    const FloatRows q =
        AsFloats(p_.element,
                 RowsAt(p_, call_.q, strides,
                        strides.Row(rules.batch_index, rules.q_head, sequence.q_begin + tile_.row),
                        scores_.rows, dim_),
                 q_);
    ScoresOfRows(q, k_, dim_, scores_, s_);
    for (int r = 0; r < scores_.rows; ++r) AddRow(rules, r, sums + r * kMaxKeyRows);
  }

  void LoadKeys(const HeadRules& rules, int64_t kv_head) {
    const TensorStrides strides = KeyStrides(p_);
    const RowsOf keys =
        RowsAt(p_, call_.k, strides,
               strides.Row(rules.batch_index, kv_head, rules.sequence.kv_begin + tile_.key),
               scores_.columns, dim_);
    PackKeys(p_.element, keys, s_, k_);
  }

  void AddRow(const HeadRules& rules, int r, float* sums) const {
    const FloatTag d;
    float* s = s_ + r * kMaxKeyRows;
    const bool as_is = scores_.full && rules.plain;
    if (!as_is && PrepareRow(rules, scores_, r, s) == 0) return;
    const float lse =
        call_.lse[p_.LseIndex(rules.batch_index, rules.q_head, rules.sequence, tile_.row + r)];
    const FloatVector factor = hn::Set(d, rules.factor() * kLog2E);
    const FloatVector offset = hn::Set(d, lse * kLog2E);
    for (const Span& part : StretchesOf(scores_, r)) {
      for (int c = part.begin; c < part.end; c += kLanes) {
        const FloatVector score = hn::LoadU(d, s + c);
        const auto hidden = hn::Eq(score, hn::Set(d, kHidden));
        const FloatVector probability = Exp2(hn::MulSub(score, factor, offset));
        hn::StoreU(hn::Add(hn::LoadU(d, sums + c), hn::IfThenZeroElse(hidden, probability)), d,
                   sums + c);
      }
    }
  }

  const CpuForwardCall& call_;
  const Problem& p_;
  const MapTile tile_;
  const int dim_;
  float* q_;  // [kMaxQueryRows][PaddedDim(dim)], unless Q is float32
  float* k_;  // K in panels
  float* s_;  // [kMaxQueryRows][kMaxKeyRows]; while keys are packed, their float32 copies
  bool loaded_ = false;
  ScoreTile scores_;
};

const float* CaptureItemImpl(const CpuForwardCall& call, const MapTile& tile, float* scratch) {
  ScratchArena arena(scratch);
  float* sums = arena.Floats(kMaxQueryRows * kMaxKeyRows);
  std::fill_n(sums, kMaxQueryRows * kMaxKeyRows, 0.0f);
  TileCapture(call, tile, arena).AddAll(sums);
  const FloatTag d;
  const Problem& p = *call.problem;
  const FloatVector share = hn::Set(d, 1.0f / static_cast<float>(p.batch * p.q_heads));
  for (int n = 0; n < kMaxQueryRows * kMaxKeyRows; n += kLanes) {
    hn::StoreU(hn::Mul(share, hn::LoadU(d, sums + n)), d, sums + n);
  }
  return sums;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(CaptureItemImpl);

const float* CaptureItem(const CpuForwardCall& call, const MapTile& tile, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(CaptureItemImpl)(call, tile, scratch);
}

}  // namespace attnd
#endif
