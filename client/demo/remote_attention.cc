#include "client/demo/remote_attention.h"

namespace attnd::demo {

absl::Status RemoteAttention::Forward(const Problem& problem, const AttentionInputs& in, float* o,
                                      float* lse) {
  return Count(client_->Forward(problem, {.q = in.q, .k = in.k, .v = in.v}, {.o = o, .lse = lse}));
}

absl::Status RemoteAttention::Backward(const Problem& problem, const AttentionInputs& in,
                                       const float* o, const float* lse, const float* d_o,
                                       const AttentionGradients& out) {
  return Count(client_->Backward(problem,
                                 {.q = in.q, .k = in.k, .v = in.v, .o = o, .lse = lse, .d_o = d_o},
                                 {.d_q = out.d_q, .d_k = out.d_k, .d_v = out.d_v}));
}

absl::Status RemoteAttention::Count(const absl::StatusOr<CallReceipt>& receipt) {
  if (!receipt.ok()) return receipt.status();
  ++calls_;
  bytes_ += receipt->bytes_sent + receipt->bytes_received;
  elapsed_ += receipt->elapsed;
  kernel_ = receipt->kernel;
  return absl::OkStatus();
}

}  // namespace attnd::demo
