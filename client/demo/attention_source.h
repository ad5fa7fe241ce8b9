// AttentionSource: computes the attention of the demo's transformer, on a daemon or in local
// float64 arithmetic, so that the same training runs on both. Tensors are float32 in the layout of
// `problem`; one thread at a time.
#pragma once

#include "absl/status/status.h"
#include "attention/problem.h"

namespace attnd::demo {

struct AttentionInputs {
  const float* q;  // [batch, length, heads, head_dim]
  const float* k;
  const float* v;
};

struct AttentionGradients {
  float* d_q;
  float* d_k;
  float* d_v;
};

class AttentionSource {
 public:
  virtual ~AttentionSource() = default;
  // Writes o [batch, length, heads, head_dim] and lse [batch, heads, length].
  virtual absl::Status Forward(const Problem& problem, const AttentionInputs& in, float* o,
                               float* lse) = 0;
  virtual absl::Status Backward(const Problem& problem, const AttentionInputs& in, const float* o,
                                const float* lse, const float* d_o,
                                const AttentionGradients& out) = 0;
};

}  // namespace attnd::demo
