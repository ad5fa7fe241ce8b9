// ChunkSequence: checks the order of a streamed call's chunks. They arrive in the order of the
// call's inputs, each from its first byte to its last. A gap, an overlap, excess bytes or another
// payload is INVALID_ARGUMENT, reason CHUNK_ORDER. Pure; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/call/tensor_spec.h"

namespace attnd {

class ChunkSequence {
 public:
  ChunkSequence() = default;
  // Chunks bring the inputs among `tensors` that are not empty.
  explicit ChunkSequence(absl::Span<const TensorSpec> tensors);

  // The id of the tensor that `size` bytes from `offset` of request field `field` belong to; they
  // have now been received.
  absl::StatusOr<int> Take(uint64_t field, uint64_t offset, int64_t size);

  bool complete() const { return current_ == inputs_.size(); }
  // OK when the caller may half-close.
  absl::Status CheckComplete() const;

 private:
  TensorList inputs_;
  size_t current_ = 0;
  int64_t received_ = 0;  // of the current payload
};

}  // namespace attnd
