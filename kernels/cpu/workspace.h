// Where the CPU engine's backward keeps what it needs between phases; forward needs nothing. All
// sizes are linear in the lengths.
//
//   delta:       rowsum(dO ∘ O) − dlse                     as lse
//   tiles_done:  how many tiles of keys a slot has added    [batch][kv_heads][kMaxSlots], int32
//   d_q:         float32 sums, unless q is float32          as q
//   d_k, d_v:    float32 sums over slots, unless k and v
//                are float32 or one slot is enough           as k, v
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
  // `base` may be null where only Bytes is asked for.
  BackwardWorkspace(const Problem& p, std::byte* base)
      : base_(reinterpret_cast<float*>(base)),
        tiles_done_at_(RoundUp(p.LseElements(), kMaxLanes)),
        d_q_at_(tiles_done_at_ + RoundUp(p.batch * p.kv_heads * kMaxSlots, kMaxLanes)),
        d_k_at_(d_q_at_ + RoundUp(p.QueryElements(), kMaxLanes)),
        d_v_at_(d_k_at_ + RoundUp(p.KeyElements(), kMaxLanes)) {}

  // Walks over the sequences; the rest of this class takes constant time.
  static int64_t Bytes(const Problem& p) {
    const BackwardWorkspace work(p, nullptr);
    if (p.element == ElementType::kFloat32) return 4 * work.d_q_at_;
    const bool one_slot = GradientSlots(p, p.MaxQueryLength()) == 1;
    return 4 * (one_slot ? work.d_k_at_ : work.d_v_at_ + RoundUp(p.ValueElements(), kMaxLanes));
  }

  float* delta() const { return base_; }
  int32_t* TilesDone(const Problem& p, int64_t batch_index, int64_t kv_head, int64_t slot) const {
    return reinterpret_cast<int32_t*>(base_ + tiles_done_at_) +
           (batch_index * p.kv_heads + kv_head) * kMaxSlots + slot;
  }
  float* d_q() const { return base_ + d_q_at_; }
  float* d_k() const { return base_ + d_k_at_; }
  float* d_v() const { return base_ + d_v_at_; }

 private:
  float* base_;
  int64_t tiles_done_at_, d_q_at_, d_k_at_, d_v_at_;
};

}  // namespace attnd
