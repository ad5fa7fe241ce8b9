// The arrays of a call: contiguous, in the problem's layout and element type. Names are the wire's;
// shapes are those of docs/NUMERICS.md.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "attention/problem.h"

namespace attnd {

struct ForwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem.bool_mask
  const void* bias = nullptr;          // iff problem.bias
};

struct ForwardOutputs {
  void* o = nullptr;
  float* lse = nullptr;  // [batch, q_heads, q_len], packed [q_heads, q_len]; null: not wanted
};

struct BackwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem.bool_mask
  const void* bias = nullptr;          // iff problem.bias
  const void* o = nullptr;             // as Forward gave them
  const float* lse = nullptr;
  const void* d_o = nullptr;
  const float* d_lse = nullptr;  // null: zero
};

struct BackwardOutputs {
  void* d_q = nullptr;
  void* d_k = nullptr;
  void* d_v = nullptr;
  float* d_bias = nullptr;  // of the bias's shape, iff problem.bias->want_gradient
  float* d_sink = nullptr;  // [batch, q_heads], iff the denominator is a sink
};

// INVALID_ARGUMENT naming the first array that the problem needs and that is null.
absl::Status CheckTensors(const Problem& p, const ForwardTensors& in, const ForwardOutputs& out);
absl::Status CheckTensors(const Problem& p, const BackwardTensors& in, const BackwardOutputs& out);

}  // namespace attnd
