#include "server/wire/decode_chunk.h"

#include "base/status_macros.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/status_details.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

using Request = v1::ForwardStreamRequest;  // its field numbers are backward's too
using Chunk = v1::PayloadChunk;

static_assert(static_cast<int>(Request::kHeaderFieldNumber) ==
              static_cast<int>(v1::BackwardStreamRequest::kHeaderFieldNumber));
static_assert(static_cast<int>(Request::kChunkFieldNumber) ==
              static_cast<int>(v1::BackwardStreamRequest::kChunkFieldNumber));

}  // namespace

absl::StatusOr<StreamPart> ParseStreamMessage(const MessageBytes& message, Direction direction) {
  const auto& type = direction == Direction::kForward ? *Request::descriptor()
                                                      : *v1::BackwardStreamRequest::descriptor();
  ASSIGN_OR_RETURN(FieldTable table,
                   CheckWire(message, {0, message.size()}, type, {.outer_fields_only = true}));
  StreamPart part;
  if (table.Has(Request::kHeaderFieldNumber)) {
    part.is_header = true;
    part.range = table.range[Request::kHeaderFieldNumber];
    return part;
  }
  if (!table.Has(Request::kChunkFieldNumber)) {
    return FieldError(reason::kBadField, "part", "a header or a chunk", "neither");
  }
  ASSIGN_OR_RETURN(FieldTable chunk, CheckWire(message, table.range[Request::kChunkFieldNumber],
                                               *Chunk::descriptor(), {.path = "chunk"}));
  part.range = chunk.range[Chunk::kDataFieldNumber];
  part.tensor = chunk.varint[Chunk::kTensorFieldNumber];
  part.offset = chunk.varint[Chunk::kOffsetFieldNumber];
  return part;
}

}  // namespace attnd
