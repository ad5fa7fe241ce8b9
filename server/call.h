// AttentionCall: one forward or backward call whose every field is valid. Made only by Decoder,
// immutable; its tensors are ranges of the request's bytes, which it keeps alive until landing, or
// lie in memory that the caller shares with the daemon.
// Any thread may read one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "attention/cost.h"
#include "attention/problem.h"
#include "server/message_bytes.h"

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

// The tensors that travel, in either direction.
enum class Tensor : uint8_t {
  kMaskBits,
  kBias,
  kK,
  kV,
  kQ,
  kLse,
  kO,
  kDO,
  kDLse,  // inputs (lse and o also forward's outputs)
  kDK,
  kDV,
  kDQ,
  kDBias,
  kDSink,  // outputs
};
inline constexpr int kTensors = 14;

absl::string_view TensorName(Tensor tensor);

// A tensor of a call and its bytes.
struct TensorSize {
  Tensor tensor;
  int64_t bytes;
};
using TensorList = absl::InlinedVector<TensorSize, 9>;

// What the caller must send and what the engine writes (lse always, whether asked for or not).
// Sizes of a validated problem fit 64 bits. d_lse is not listed: it may be absent.
TensorList InputsOf(const Problem& problem, Direction direction);
TensorList OutputsOf(const Problem& problem, Direction direction);

// A tensor that the caller brings, and where its bytes lie in the message; only their number counts
// when it lies in shared memory.
struct TensorSource {
  Tensor tensor;
  ByteRange range;
};

class ResidualTensors;

// Where a residual lies: here, or on the device of this number.
inline constexpr int kHostMemory = -1;

// Of an offset in shared memory.
inline constexpr uint64_t kSharedAlignment = 64;

// Where the header says that a tensor lies: a region of the caller's shared memory and bytes there.
struct SharedPlace {
  Tensor tensor;
  int region;  // index into SharedRequest::regions
  uint64_t offset;
  int64_t size;
};
struct SharedRequest {
  std::vector<std::string> regions;  // tokens, at least one
  uint64_t use = 0;
  absl::InlinedVector<SharedPlace, 9> places;
};

// The same as pointers; made by SharedMemoryTable.
struct SharedTensors {
  std::array<std::byte*, kTensors> at = {};  // null: not in shared memory
  std::shared_ptr<const void> memory;        // keeps the regions mapped, together with their table
};

// Its parts stand on the heap: a call passes through every stage, and moves as a pointer.
class AttentionCall {
 public:
  const Problem& problem() const { return parts_->problem; }
  Direction direction() const { return parts_->direction; }
  bool want_lse() const { return parts_->want_lse; }
  Priority priority() const { return parts_->priority; }
  const std::string& request_id() const { return parts_->request_id; }
  absl::Span<const TensorSource> inputs() const { return parts_->inputs; }
  const MessageBytes& message() const { return parts_->message; }
  double flops() const { return parts_->flops; }
  int64_t input_bytes() const { return parts_->input_bytes; }  // of all tensors, wherever they lie
  int64_t output_bytes() const { return parts_->output_bytes; }

  // A forward whose tensors shall be kept, for so long (0: the server's choice).
  bool keep_residual() const { return parts_->keep_residual; }
  absl::Duration residual_ttl() const { return parts_->residual_ttl; }
  // A backward whose token is not empty brings d_o (and d_lse) alone; its other tensors lie in
  // residual(), once the token has been looked up, at residual_place(): only that device can run
  // it, if it is one. shared_ptr: see ResidualTensors.
  const std::string& residual_token() const { return parts_->residual_token; }
  const std::shared_ptr<const ResidualTensors>& residual() const { return parts_->residual; }
  int residual_place() const { return parts_->residual_place; }
  void UseResidual(std::shared_ptr<const ResidualTensors> residual, int place) {
    parts_->residual = std::move(residual);
    parts_->residual_place = place;
  }

  // Tensors in shared memory: neither the message nor the reply holds one. The engine reads and
  // writes them where they lie, but for what shall be kept: that is copied first.
  const SharedRequest* shared_request() const { return parts_->shared_request.get(); }  // or null
  std::byte* shared(Tensor tensor) const { return parts_->shared.at[static_cast<int>(tensor)]; }
  bool InPlace(Tensor tensor) const { return shared(tensor) != nullptr && !keep_residual(); }
  void PlaceInSharedMemory(SharedTensors tensors);
  int64_t shared_input_bytes() const { return parts_->shared_input_bytes; }
  int64_t shared_output_bytes() const { return parts_->shared_output_bytes; }

  // Gives the received bytes back once they have been copied out; inputs() has no meaning after.
  void DropMessage() { parts_->message = MessageBytes(); }

 private:
  friend class Decoder;
  struct Parts {
    Problem problem;
    Direction direction = Direction::kForward;
    bool want_lse = false;
    Priority priority = Priority::kNormal;
    std::string request_id;
    bool keep_residual = false;
    absl::Duration residual_ttl;
    std::string residual_token;
    std::shared_ptr<const ResidualTensors> residual;
    int residual_place = kHostMemory;
    absl::InlinedVector<TensorSource, 9> inputs;
    MessageBytes message;
    double flops = 0;
    int64_t input_bytes = 0;
    int64_t output_bytes = 0;
    std::unique_ptr<const SharedRequest> shared_request;
    SharedTensors shared;
    int64_t shared_input_bytes = 0;   // part of input_bytes
    int64_t shared_output_bytes = 0;  // part of output_bytes
  };
  AttentionCall() : parts_(std::make_unique<Parts>()) {}

  std::unique_ptr<Parts> parts_;
};

}  // namespace attnd
