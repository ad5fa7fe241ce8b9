// Where the CPU engine keeps what a call needs between phases. All sizes are linear in the lengths.
//
// Forward   keys:   K transposed into panels, float32      [kv_heads][padded rows / 64][dim][64]
//           values: V as padded float32 rows, unless it is
//                   read in place                          [kv_heads][padded rows][PaddedDim]
//           finite: whether V is finite, per 64 rows       [kv_heads][padded rows / 64]
//           Sequences start on multiples of 64 rows.
// Backward  delta:  rowsum(dO ∘ O) − dlse                  as lse
//           d_q:    float32 sums, unless q is float32      as q
//           slots:  float32 sums of dK and dV of a slot    [slots] as k and v
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

struct ForwardWorkspace {
  float* keys;
  float* values;
  uint8_t* finite;
  int64_t rows;  // per KV head
  int64_t bytes;

  static constexpr int64_t kUnit = kMaxPanelColumns;

  ForwardWorkspace(const Problem& p, std::byte* base) {
    rows = IsPacked(p.layout) ? RoundUp(p.kv_len, kUnit) + 2 * kUnit * p.batch
                              : p.batch * RoundUp(p.kv_len, kUnit);
    int64_t key_bytes = p.kv_heads * rows * p.qk_head_dim * 4;
    int64_t value_bytes = IsReadInPlace(p, ValueStrides(p), p.v_head_dim)
                              ? 0
                              : p.kv_heads * rows * PaddedDim(p.v_head_dim) * 4;
    keys = reinterpret_cast<float*>(base);
    values = reinterpret_cast<float*>(base + key_bytes);
    finite = reinterpret_cast<uint8_t*>(base + key_bytes + value_bytes);
    bytes = key_bytes + value_bytes + RoundUp(p.kv_heads * rows / kUnit, 64);
  }

  // The padded row of a sequence's first key.
  static int64_t FirstRow(const Problem& p, int64_t batch_index, const Sequence& s) {
    return IsPacked(p.layout) ? RoundUp(s.kv_begin, kUnit) + 2 * kUnit * batch_index
                              : batch_index * RoundUp(p.kv_len, kUnit);
  }
};

struct BackwardWorkspace {
  float* delta;
  float* d_q;
  float* d_k_slots;
  float* d_v_slots;
  int64_t bytes;

  BackwardWorkspace(const Problem& p, std::byte* base) {
    int64_t slots = GradientSlots(p, p.MaxQueryLength());
    int64_t used = 0;
    auto take = [&](int64_t floats) {
      float* place = reinterpret_cast<float*>(base + used);
      used += RoundUp(floats * 4, 64);
      return place;
    };
    delta = take(p.LseElements());
    d_q = take(p.element == ElementType::kFloat32 ? 0 : p.QueryElements());
    d_k_slots = take(slots > 1 ? slots * p.KeyElements() : 0);
    d_v_slots = take(slots > 1 ? slots * p.ValueElements() : 0);
    bytes = used;
  }
};

}  // namespace attnd
