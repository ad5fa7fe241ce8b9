// LogicalCall: one Forward or Backward of the caller, cut into shards. It knows what each shard
// sends and where its reply lands, and nothing of connections, retries or time: CallRunner drives
// it.
//
// Threads: any, each shard by one at a time. The problem, the arrays and the options outlive it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/problem.h"
#include "client/cpp/attention_client.h"
#include "client/cpp/bias_gradient_sum.h"
#include "client/cpp/reply_decoder.h"
#include "client/cpp/send_ledger.h"
#include "client/cpp/shard.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// A request message, and what it holds of the caller's arrays.
struct EncodedRequest {
  grpc::ByteBuffer message;
  int64_t payload_bytes = 0;
  int64_t copied_bytes = 0;
};

class LogicalCall {
 public:
  // Forward. `header` holds the options that every shard sends.
  LogicalCall(const Problem& problem, std::vector<ShardRange> shards, v1::CallOptions header,
              const ForwardTensors& in, const ForwardOutputs& out);
  // Backward.
  LogicalCall(const Problem& problem, std::vector<ShardRange> shards, v1::CallOptions header,
              const BackwardTensors& in, const BackwardOutputs& out);

  int64_t shard_count() const { return static_cast<int64_t>(shards_.size()); }
  const std::string& method() const { return method_; }
  int64_t total_bytes() const { return total_bytes_; }  // of all payloads, both ways

  // Shards that need no server; they have been filled when this is true.
  bool FillIfTrivial(int64_t shard);

  // The request of a shard. Its slices may point into the caller's arrays until `ledger` has them
  // all back.
  EncodedRequest Encode(int64_t shard, SendLedger& ledger) const;

  // Writes a shard's reply to the caller's outputs. Gives the payload bytes.
  absl::StatusOr<int64_t> Land(int64_t shard, const grpc::ByteBuffer& reply, v1::Receipt& receipt);

 private:
  std::string Header(const Problem& sub) const;
  std::vector<ReplyPayload> ReplyPayloads(const ShardRuns& runs);
  bool SumsBiasGradient() const { return bias_sum_.has_value(); }
  void CountBytes();

  const Problem& problem_;
  const std::vector<ShardRange> shards_;
  const Direction direction_;
  const std::string method_;
  const v1::CallOptions options_;
  BackwardTensors in_;  // forward uses its first five
  ForwardOutputs forward_out_;
  BackwardOutputs backward_out_;
  std::optional<BiasGradientSum> bias_sum_;
  int64_t total_bytes_ = 0;
};

}  // namespace attnd
