// Where the CPU engine keeps what a call needs between phases. All sizes are linear in the lengths.
//
// Forward   keys:   K transposed into panels, float32,
//                   unless queries are few                 [kv_heads][padded rows / 64][dim][64]
//           values: V as padded float32 rows, unless it is
//                   read in place                          [kv_heads][padded rows][PaddedDim]
//           finite: whether V is, per 64 rows, if copied    [kv_heads][padded rows / 64]
//           Sequences start on multiples of 64 rows.
// Backward  delta:  rowsum(dO ∘ O) − dlse                  as lse
//           d_q:    float32 sums, unless q is float32      as q
//           slots:  float32 sums of dK and dV of a slot    [slots] as k, v; none where one is
//           enough
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.h"
#include "attention/tensor_view.h"
#include "kernels/cpu/tiles.h"

namespace attnd {

// Whether matrix products may read a tensor's rows where they lie: float32, in whole vectors,
// without gaps.
inline bool IsReadInPlace(const Problem& p, const TensorStrides& strides, int64_t dim) {
  return p.element == ElementType::kFloat32 && dim % kMaxLanes == 0 && strides.row == dim;
}

class ForwardWorkspace {
 public:
  static constexpr int64_t kUnit = kMaxPanelColumns;

  // `base` may be null where only bytes() is asked for.
  ForwardWorkspace(const Problem& p, std::byte* base) : base_(base) {
    rows_ = IsPacked(p.layout) ? RoundUp(p.kv_len, kUnit) + 2 * kUnit * p.batch
                               : p.batch * RoundUp(p.kv_len, kUnit);
    const bool packs = IsPacked(p.layout) || PacksKeys(p, p.q_len);
    values_at_ = packs ? p.kv_heads * rows_ * p.qk_head_dim * 4 : 0;
    finite_at_ = values_at_;
    if (!IsReadInPlace(p, ValueStrides(p), p.v_head_dim)) {
      finite_at_ += p.kv_heads * rows_ * PaddedDim(p.v_head_dim) * 4;
    }
    bytes_ = finite_at_ + RoundUp(p.kv_heads * rows_ / kUnit, 64);
  }

  float* keys() const { return reinterpret_cast<float*>(base_); }
  float* values() const { return reinterpret_cast<float*>(base_ + values_at_); }
  uint8_t* finite() const { return reinterpret_cast<uint8_t*>(base_ + finite_at_); }
  int64_t rows() const { return rows_; }  // of a KV head
  int64_t bytes() const { return bytes_; }

  // The padded row of a sequence's first key.
  static int64_t FirstRow(const Problem& p, int64_t batch_index, const Sequence& s) {
    return IsPacked(p.layout) ? RoundUp(s.kv_begin, kUnit) + 2 * kUnit * batch_index
                              : batch_index * RoundUp(p.kv_len, kUnit);
  }

 private:
  std::byte* base_;
  int64_t rows_, values_at_, finite_at_, bytes_;
};

class BackwardWorkspace {
 public:
  BackwardWorkspace(const Problem& p, std::byte* base)
      : base_(reinterpret_cast<float*>(base)),
        d_q_at_(RoundUp(p.LseElements(), kMaxLanes)),
        slots_at_(d_q_at_),
        d_v_at_(RoundUp(p.KeyElements(), kMaxLanes)),
        slot_floats_(d_v_at_ + RoundUp(p.ValueElements(), kMaxLanes)) {
    if (p.element != ElementType::kFloat32) slots_at_ += RoundUp(p.QueryElements(), kMaxLanes);
  }

  // Walks over the sequences; the rest of this class takes constant time.
  static int64_t Bytes(const Problem& p) {
    const BackwardWorkspace work(p, nullptr);
    const int64_t slots = GradientSlots(p, p.MaxQueryLength());
    return 4 * (work.slots_at_ + (slots > 1 ? slots * work.slot_floats_ : 0));
  }

  float* delta() const { return base_; }
  float* d_q() const { return base_ + d_q_at_; }
  float* d_k(int64_t slot) const { return base_ + slots_at_ + slot * slot_floats_; }
  float* d_v(int64_t slot) const { return d_k(slot) + d_v_at_; }
  int64_t slot_floats() const { return slot_floats_; }  // from one slot to the next

 private:
  float* base_;
  int64_t d_q_at_, slots_at_, d_v_at_, slot_floats_;
};

}  // namespace attnd
