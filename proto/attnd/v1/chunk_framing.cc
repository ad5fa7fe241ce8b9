#include "proto/attnd/v1/chunk_framing.h"

#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/wire_writer.h"

namespace attnd {
namespace {

using Message = v1::ForwardStreamRequest;

// All four stream messages have the same two parts.
template <class Other>
constexpr bool kSameParts = static_cast<int>(Message::kHeaderFieldNumber) ==
                                static_cast<int>(Other::kHeaderFieldNumber) &&
                            static_cast<int>(Message::kChunkFieldNumber) ==
                                static_cast<int>(Other::kChunkFieldNumber);
static_assert(kSameParts<v1::BackwardStreamRequest>);
static_assert(kSameParts<v1::ForwardStreamResponse>);
static_assert(kSameParts<v1::BackwardStreamResponse>);

}  // namespace

std::string FrameHeader(const std::string& header) {
  std::string message;
  WireWriter(message).Length(Message::kHeaderFieldNumber, header.size());
  return message + header;
}

std::string ChunkPrefix(int field, int64_t offset, int64_t data_bytes) {
  std::string chunk, message;
  WireWriter writer(chunk);
  writer.Number(v1::PayloadChunk::kTensorFieldNumber, static_cast<uint64_t>(field));
  writer.Number(v1::PayloadChunk::kOffsetFieldNumber, static_cast<uint64_t>(offset));
  writer.Length(v1::PayloadChunk::kDataFieldNumber, static_cast<uint64_t>(data_bytes));
  WireWriter(message).Length(Message::kChunkFieldNumber,
                             chunk.size() + static_cast<uint64_t>(data_bytes));
  return message + chunk;
}

}  // namespace attnd
