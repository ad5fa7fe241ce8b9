// LocalAttention: the demo's attention in float64 on this machine, by attention/reference.h,
// rounded to float32 at the end. Errors: none. One thread at a time.
#pragma once

#include "client/demo/attention_source.h"

namespace attnd::demo {

class LocalAttention final : public AttentionSource {
 public:
  absl::Status Forward(const Problem& problem, const AttentionInputs& in, float* o,
                       float* lse) override;
  absl::Status Backward(const Problem& problem, const AttentionInputs& in, const float* o,
                        const float* lse, const float* d_o, const AttentionGradients& out) override;
};

}  // namespace attnd::demo
