#include "proto/attnd/v1/chunk_framing.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include "proto/attnd/v1/attention.pb.h"

namespace attnd {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;
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

std::string TagAndLength(int field, int64_t length) {
  uint8_t bytes[20];
  uint32_t tag = WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(tag, bytes);
  end = CodedOutputStream::WriteVarint64ToArray(static_cast<uint64_t>(length), end);
  return std::string(bytes, end);
}

}  // namespace

std::string FrameHeader(const std::string& header) {
  return TagAndLength(Message::kHeaderFieldNumber, static_cast<int64_t>(header.size())) + header;
}

std::string ChunkPrefix(int field, int64_t offset, int64_t data_bytes) {
  v1::PayloadChunk chunk;
  chunk.set_tensor(static_cast<uint32_t>(field));
  chunk.set_offset(static_cast<uint64_t>(offset));
  std::string inner =
      chunk.SerializeAsString() + TagAndLength(v1::PayloadChunk::kDataFieldNumber, data_bytes);
  return TagAndLength(Message::kChunkFieldNumber, static_cast<int64_t>(inner.size()) + data_bytes) +
         inner;
}

}  // namespace attnd
