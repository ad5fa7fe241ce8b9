#include "server/chunk_sequence.h"

#include "absl/strings/str_cat.h"
#include "server/encode_fields.h"
#include "server/status_details.h"

namespace attnd {

absl::StatusOr<Tensor> ChunkSequence::Take(uint64_t field, uint64_t offset, int64_t size) {
  if (complete()) {
    return FieldError(reason::kChunkOrder, "chunk", "half-close after the last payload",
                      absl::StrCat("a chunk of field ", field));
  }
  const TensorSource& input = inputs_[current_];
  absl::string_view name = TensorName(input.tensor);
  if (field != static_cast<uint64_t>(RequestField(input.tensor))) {
    return FieldError(
        reason::kChunkOrder, "chunk.tensor",
        absl::StrCat(RequestField(input.tensor), " (", name, " from byte ", received_, ")"),
        absl::StrCat(field));
  }
  if (offset != static_cast<uint64_t>(received_)) {
    return FieldError(reason::kChunkOrder, "chunk.offset", absl::StrCat(received_, " of ", name),
                      absl::StrCat(offset));
  }
  if (size < 1 || size > kMaxChunkBytes) {
    return FieldError(reason::kBadField, "chunk.data",
                      absl::StrCat("1..", kMaxChunkBytes, " bytes"), absl::StrCat(size));
  }
  if (size > input.range.size - received_) {
    return FieldError(reason::kChunkOrder, "chunk.data",
                      absl::StrCat("at most the ", input.range.size - received_,
                                   " bytes that are left of ", name),
                      absl::StrCat(size));
  }
  received_ += size;
  if (received_ == input.range.size) {
    ++current_;
    received_ = 0;
  }
  return input.tensor;
}

absl::Status ChunkSequence::CheckComplete() const {
  if (complete()) return absl::OkStatus();
  const TensorSource& input = inputs_[current_];
  return FieldError(reason::kChunkOrder, TensorName(input.tensor),
                    absl::StrCat(input.range.size, " bytes in chunks before half-close"),
                    absl::StrCat(received_));
}

}  // namespace attnd
