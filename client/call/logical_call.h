// LogicalCall: one Forward or Backward of the caller, cut into shards. It knows what each shard
// sends and where its reply lands, and nothing of connections, retries or time: CallRunner drives
// it.
//
// Threads: any, each shard by one at a time. The problem, the arrays and the options outlive it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/problem.h"
#include "attention/shard.h"
#include "client/call/borrowed_slices.h"
#include "client/call/chunk_source.h"
#include "client/call/known_masks.h"
#include "client/call/lease_book.h"
#include "client/call/reply_decoder.h"
#include "client/call/request_encoder.h"
#include "client/call/residual_state.h"
#include "client/call/shared_tensors.h"
#include "client/shards/bias_gradient_sum.h"
#include "client/shards/shard_merger.h"
#include "client/types/capture.h"
#include "client/types/tensors.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/mask_codec.h"
#include "proto/attnd/v1/problem_codec.h"

namespace attnd {

// A request message, and what it holds of the caller's arrays.
struct EncodedRequest {
  grpc::ByteBuffer message;
  int64_t payload_bytes = 0;
  int64_t copied_bytes = 0;
  bool leased = false;  // by a residual's token
};

// A request whose tensors lie in shared memory: the message, and the places of the tensors.
struct SharedShard {
  std::string header;
  SharedRequest tensors;
  bool leased = false;
};

struct StreamedRequest {
  ChunkSource source;
  bool leased = false;
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
  const std::string& method() const { return MethodPath(direction_, false); }
  const std::string& stream_method() const { return MethodPath(direction_, true); }
  int64_t total_bytes() const { return total_bytes_; }  // of all payloads, both ways

  // Forward: asks that each shard's tensors be kept; TakeKept has the leases afterwards, which the
  // caller adds to its book. `address` of Land tells where a shard was computed.
  void Keep(absl::Duration ttl);
  bool keeps() const { return keep_; }
  std::vector<HeldLease> TakeKept();  // of each shard; without a token: not kept

  // Forward of one shard: asks for its attention map too; TakeCaptured has it afterwards.
  void Capture(const CaptureOptions& options);
  std::optional<CapturedAttention> TakeCaptured() { return std::move(captured_); }

  // Backward: shards whose lease is held send d_o alone, to where it is held.
  void UseLeases(const ResidualState& residual);
  // The address of the shard's lease, -1 without one.
  int LeasedAddress(int64_t shard) const;
  // The address of the server that must compute the call; -1: any.
  int bound_address() const { return capture_.has_value() ? capture_->previous.address : -1; }
  // The lease is lost, or its server cannot be reached: from now on the shard is sent in full.
  void DropLease(int64_t shard, bool lost);

  // Large masks travel once: later calls name those that `masks` knows. `lists_outside`: the lists
  // travel as a payload.
  void NameMasks(KnownMasks& masks, bool lists_outside);
  // A server does not know the mask that the shard named: it is sent whole. False: it was.
  bool SendWholeMask(int64_t shard);

  // Shards that need no server; they have been filled when this is true.
  bool FillIfTrivial(int64_t shard);

  // The request of a shard. Its slices may point into the caller's arrays until `borrowed` has them
  // all back.
  EncodedRequest Encode(int64_t shard, BorrowedSlices& borrowed) const;
  StreamedRequest EncodeStream(int64_t shard, BorrowedSlices& borrowed, int64_t chunk_bytes) const;
  // Where a reply's payloads go.
  struct ReplyPlace {
    std::vector<ReplyPayload> payloads;
    std::vector<float> addends;  // of the bias gradient, where shards sum it
    ShardPart part;              // of a partial shard
    int64_t bytes = 0;
  };
  // Tensors where the daemon can reach them, `place` being where the reply's go; nothing when there
  // is no memory for that.
  std::optional<SharedShard> EncodeShared(int64_t shard, SharedMemory& memory,
                                          const ReplyPlace& place) const;
  // Returns the size of the larger of the shard's request and reply, as one message.
  int64_t LargerMessage(int64_t shard) const {
    return larger_message_[shard] + (BringsLists(shard) ? problem_.mask->bytes() : 0);
  }

  // Writes a shard's reply to the caller's outputs. Gives the payload bytes.
  absl::StatusOr<int64_t> Land(int64_t shard, const grpc::ByteBuffer& reply, int address,
                               ReplyHeader& header);

  // The same in steps: where it goes, and that all of it is there.
  ReplyPlace PlaceOf(int64_t shard);
  void Landed(int64_t shard, ReplyPlace place, const ReplyHeader& header, int address);

 private:
  static const std::string& MethodPath(Direction direction, bool streamed);
  std::string Header(int64_t shard, const std::string& token, bool streamed) const;
  // Encoder: RequestEncoder or ChunkSource.
  template <class Encoder>
  void AddPayloads(int64_t shard, bool leased, Encoder& encoder) const;
  template <class Encoder>
  void AddKept(const ShardRuns& runs, Encoder& encoder) const;
  void KeepLease(int64_t shard, int address, const v1::Residual& residual);
  void TakeCapture(int address, const v1::CapturedMap& map);
  std::string TokenOf(int64_t shard) const;  // empty: no lease
  std::vector<ReplyPayload> ReplyPayloads(const ShardRuns& runs, bool partial);
  // Leads what a partial shard brings to `part` instead of the caller's arrays.
  void PlacePart(ReplyPlace& place);
  bool IsPartOf(int64_t shard) const { return IsPartial(shards_[shard], direction_); }
  bool SumsBiasGradient() const { return bias_sum_.has_value(); }
  // Whether lists of the mask are a payload of the shard.
  bool BringsLists(int64_t shard) const {
    return lists_outside_ && mask_forms_[shard] == MaskForm::kWhole;
  }
  const SplitMask& Split() const;
  void CountBytes();

  const Problem& problem_;
  const std::vector<ShardRange> shards_;
  const Direction direction_;
  const v1::CallOptions options_;
  BackwardTensors in_;  // forward uses its first five
  ForwardOutputs forward_out_;
  BackwardOutputs backward_out_;
  std::optional<BiasGradientSum> bias_sum_;
  std::optional<ShardMerger> merger_;  // where shards are partial
  bool keep_ = false;
  uint32_t keep_ttl_ms_ = 0;
  std::vector<HeldLease> kept_;              // of each shard, by the worker that holds it
  const ResidualState* residual_ = nullptr;  // leases of a backward
  std::vector<LeaseBook::Id> leases_;        // of each shard, by the worker that holds it
  std::optional<CaptureOptions> capture_;
  std::optional<CapturedAttention> captured_;  // by the worker that holds the shard
  KnownMasks* known_masks_ = nullptr;          // null: each shard brings the mask
  std::vector<MaskForm> mask_forms_;           // of each shard, by the worker that holds it
  bool lists_outside_ = false;
  mutable std::once_flag split_once_;
  mutable SplitMask split_;  // made when the first shard needs it
  int64_t total_bytes_ = 0;
  std::vector<int64_t> larger_message_;  // of each shard
};

}  // namespace attnd
