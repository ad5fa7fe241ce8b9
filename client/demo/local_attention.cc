#include "client/demo/local_attention.h"

#include <algorithm>

#include "attention/reference.h"

namespace attnd::demo {
namespace {

void RoundTo(const std::vector<double>& from, float* to) {
  std::transform(from.begin(), from.end(), to, [](double x) { return static_cast<float>(x); });
}

}  // namespace

absl::Status LocalAttention::Forward(const Problem& problem, const AttentionInputs& in, float* o,
                                     float* lse) {
  ReferenceOutputs out = Reference(problem, {.q = in.q, .k = in.k, .v = in.v}).Forward();
  RoundTo(out.o, o);
  RoundTo(out.lse, lse);
  return absl::OkStatus();
}

// o and lse are computed again in float64 instead of taken rounded.
absl::Status LocalAttention::Backward(const Problem& problem, const AttentionInputs& in,
                                      const float* /*o*/, const float* /*lse*/, const float* d_o,
                                      const AttentionGradients& out) {
  ReferenceGradients gradients =
      Reference(problem, {.q = in.q, .k = in.k, .v = in.v}).Backward(d_o, /*d_lse=*/nullptr);
  RoundTo(gradients.d_q, out.d_q);
  RoundTo(gradients.d_k, out.d_k);
  RoundTo(gradients.d_v, out.d_v);
  return absl::OkStatus();
}

}  // namespace attnd::demo
