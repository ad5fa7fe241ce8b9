// Where the CPU engine's backward keeps what it needs between phases; forward needs nothing. All
// sizes are linear in the lengths.
//
//   delta:  rowsum(dO ∘ O) − dlse                  as lse
//   d_q:    float32 sums, unless q is float32      as q
//   slots:  float32 sums of dK and dV of a slot    [slots] as k, v; none where one is enough
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
