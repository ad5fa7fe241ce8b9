#include "server/rpc/chunk_sequence.h"

#include "absl/strings/str_cat.h"
#include "server/call/status_details.h"

namespace attnd {

ChunkSequence::ChunkSequence(absl::Span<const TensorSpec> tensors) {
  for (const TensorSpec& tensor : tensors) {
    if (tensor.role == TensorUse::kInput && tensor.bytes > 0) inputs_.push_back(tensor);
  }
}

absl::StatusOr<int> ChunkSequence::Take(uint64_t field, uint64_t offset, int64_t size) {
  if (complete()) {
    return FieldError(reason::kChunkOrder, "chunk", "half-close after the last payload",
                      absl::StrCat("a chunk of field ", field));
  }
  const TensorSpec& input = inputs_[current_];
  if (field != static_cast<uint64_t>(input.field)) {
    return FieldError(reason::kChunkOrder, "chunk.tensor",
                      absl::StrCat(input.field, " (", input.name, " from byte ", received_, ")"),
                      absl::StrCat(field));
  }
  if (offset != static_cast<uint64_t>(received_)) {
    return FieldError(reason::kChunkOrder, "chunk.offset",
                      absl::StrCat(received_, " of ", input.name), absl::StrCat(offset));
  }
  if (size < 1 || size > kMaxChunkBytes) {
    return FieldError(reason::kBadField, "chunk.data",
                      absl::StrCat("1..", kMaxChunkBytes, " bytes"), absl::StrCat(size));
  }
  if (size > input.bytes - received_) {
    return FieldError(reason::kChunkOrder, "chunk.data",
                      absl::StrCat("at most the ", input.bytes - received_,
                                   " bytes that are left of ", input.name),
                      absl::StrCat(size));
  }
  received_ += size;
  if (received_ == input.bytes) {
    ++current_;
    received_ = 0;
  }
  return input.id;
}

absl::Status ChunkSequence::CheckComplete() const {
  if (complete()) return absl::OkStatus();
  const TensorSpec& input = inputs_[current_];
  return FieldError(reason::kChunkOrder, input.name,
                    absl::StrCat(input.bytes, " bytes in chunks before half-close"),
                    absl::StrCat(received_));
}

}  // namespace attnd
