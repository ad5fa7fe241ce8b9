// One message of a streamed call, taken apart without touching its data: ForwardStreamRequest or
// BackwardStreamRequest. A header's inside is for Decoder::DecodeHeader to check. Errors:
// INVALID_ARGUMENT naming the field. Any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "server/call/message_bytes.h"

namespace attnd {

struct StreamPart {
  bool is_header = false;
  ByteRange range;                  // of the header's message, or of the chunk's data
  uint64_t tensor = 0, offset = 0;  // of a chunk
};

absl::StatusOr<StreamPart> ParseStreamMessage(const MessageBytes& message, Direction direction);

}  // namespace attnd
