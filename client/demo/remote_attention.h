// RemoteAttention: the demo's attention on a daemon. Each call is an RPC; bytes sent and received
// are counted. Errors: the client's. One thread at a time.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "client/attention_client.h"
#include "client/demo/attention_source.h"

namespace attnd::demo {

class RemoteAttention final : public AttentionSource {
 public:
  explicit RemoteAttention(std::unique_ptr<AttentionClient> client) : client_(std::move(client)) {}
  absl::Status Forward(const Problem& problem, const AttentionInputs& in, float* o,
                       float* lse) override;
  absl::Status Backward(const Problem& problem, const AttentionInputs& in, const float* o,
                        const float* lse, const float* d_o, const AttentionGradients& out) override;

  int64_t calls() const { return calls_; }
  int64_t bytes() const { return bytes_; }  // payload, both ways
  absl::Duration elapsed() const { return elapsed_; }
  const std::string& kernel() const { return kernel_; }  // that ran last

 private:
  absl::Status Count(const absl::StatusOr<CallReceipt>& receipt);

  std::unique_ptr<AttentionClient> client_;
  int64_t calls_ = 0;
  int64_t bytes_ = 0;
  absl::Duration elapsed_;
  std::string kernel_;
};

}  // namespace attnd::demo
