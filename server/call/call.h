// AttentionCall: one forward or backward call whose every field is valid. Made only by Decoder. Its
// payloads are ranges of the request's bytes, which it keeps alive until Landing has copied them
// and drops them (DropMessage); nothing else of it ever changes.
// CallMemory: what a call uses beside its message: its caller's shared memory, and a residual.
// Found once the call is decoded. Any thread may read them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "server/call/message_bytes.h"
#include "server/call/tensor_spec.h"

namespace attnd {

enum class Priority : uint8_t { kLow, kNormal, kHigh };
inline constexpr int kPriorities = 3;

// Shares of the device between callers at these priorities.
constexpr double WeightOf(Priority priority) {
  constexpr double kWeights[kPriorities] = {1, 4, 16};
  return kWeights[static_cast<int>(priority)];
}

constexpr absl::string_view PriorityName(Priority priority) {
  constexpr absl::string_view kNames[] = {"low", "normal", "high"};
  return kNames[static_cast<int>(priority)];
}

constexpr absl::string_view DirectionName(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

class ResidualTensors;
struct KeptMap;

// Where a residual lies: here, or on the device of this number.
inline constexpr int kHostMemory = -1;

// Offsets in shared memory are multiples of this.
inline constexpr uint64_t kSharedAlignment = 64;

// The regions of the caller's shared memory in which tensors of a call lie.
struct SharedRequest {
  std::vector<std::string> regions;  // tokens, at least one
  uint64_t use = 0;
};

// The attention map that a forward is asked for beside its results (attnd.v1.Capture).
struct CaptureWish {
  int64_t block = 0;
  bool keep = false;
  std::string previous;  // token of a kept map; empty: none

  bool needs_map() const { return keep || !previous.empty(); }
};

struct CallMemory {
  TensorPlaces shared;                  // of the tensors that lie in a region
  std::shared_ptr<const void> regions;  // keeps them mapped, together with their table
  // Null without a token. When residual_place is a device, only that device can run the call.
  // shared_ptr: see ResidualTensors.
  std::shared_ptr<const ResidualTensors> residual;
  int residual_place = kHostMemory;
  std::shared_ptr<const KeptMap> previous_map;  // that the capture's distance is from, or null
};

// Its parts lie on the heap: a call passes through every stage and moves as a pointer.
class AttentionCall {
 public:
  const Problem& problem() const { return parts_->problem; }
  Direction direction() const { return parts_->direction; }
  Priority priority() const { return parts_->priority; }
  const std::string& request_id() const { return parts_->request_id; }
  absl::Span<const TensorSpec> tensors() const { return parts_->tensors; }
  const MessageBytes& message() const { return parts_->message; }
  // The bytes of all tensors of a role, wherever they lie.
  int64_t input_bytes() const { return BytesOf(TensorUse::kInput); }
  int64_t kept_bytes() const { return BytesOf(TensorUse::kKept); }
  int64_t output_bytes() const { return BytesOf(TensorUse::kOutput); }

  // A forward whose tensors are to be kept, for so long (0: the server's choice).
  bool keep_residual() const { return parts_->keep_residual; }
  absl::Duration residual_ttl() const { return parts_->residual_ttl; }
  // A backward whose token is not empty brings d_o (and d_lse) alone; its other tensors are kept.
  const std::string& residual_token() const { return parts_->residual_token; }

  const CaptureWish* capture() const { return parts_->capture.get(); }  // or null

  // Tensors in shared memory are neither in the message nor in the reply.
  const SharedRequest* shared_request() const { return parts_->shared_request.get(); }  // or null
  int64_t shared_input_bytes() const { return BytesOf(TensorUse::kInput, true); }
  int64_t shared_output_bytes() const { return BytesOf(TensorUse::kOutput, true); }

  // That the description of its mask and the tiles that it visits take, while the call lives.
  int64_t mask_bytes() const { return parts_->mask_bytes; }
  int64_t mask_plan_bytes() const { return parts_->mask_plan_bytes; }  // of them, the tiles

  // For Landing, once the payloads have been copied: frees the received bytes.
  void DropMessage() { parts_->message = MessageBytes(); }

 private:
  friend class Decoder;
  int64_t BytesOf(TensorUse role, bool shared_only = false) const {
    int64_t bytes = 0;
    for (const TensorSpec& tensor : tensors()) {
      if (tensor.role != role || (shared_only && tensor.region == kNoRegion)) continue;
      bytes += tensor.bytes;
    }
    return bytes;
  }
  struct Parts {
    Problem problem;
    std::shared_ptr<const void> mask_plan;  // held, so that the engine finds it compiled
    int64_t mask_bytes = 0, mask_plan_bytes = 0;
    Direction direction = Direction::kForward;
    Priority priority = Priority::kNormal;
    std::string request_id;
    bool keep_residual = false;
    absl::Duration residual_ttl;
    std::string residual_token;
    TensorList tensors;
    MessageBytes message;
    std::unique_ptr<const SharedRequest> shared_request;
    std::unique_ptr<const CaptureWish> capture;
  };
  AttentionCall() : parts_(std::make_unique<Parts>()) {}

  std::unique_ptr<Parts> parts_;
};

}  // namespace attnd
