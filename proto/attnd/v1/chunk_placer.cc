#include "proto/attnd/v1/chunk_placer.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

using google::protobuf::internal::WireFormatLite;
using Message = v1::ForwardStreamRequest;  // all stream messages have these parts
using Chunk = v1::PayloadChunk;

constexpr uint32_t Tag(int field, WireFormatLite::WireType type) {
  return static_cast<uint32_t>(field) << 3 | type;
}

}  // namespace

bool ParseChunkForm(absl::Span<const uint8_t> beginning, int64_t message_bytes, ChunkForm& form) {
  google::protobuf::io::CodedInputStream in(beginning.data(), static_cast<int>(beginning.size()));
  form = ChunkForm();
  uint64_t chunk_bytes = 0, data_bytes = 0;
  if (in.ReadTag() != Tag(Message::kChunkFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED) ||
      !in.ReadVarint64(&chunk_bytes)) {
    return false;
  }
  const int64_t chunk_at = in.CurrentPosition();
  uint32_t tag = in.ReadTag();
  if (tag != Tag(Chunk::kTensorFieldNumber, WireFormatLite::WIRETYPE_VARINT) ||
      !in.ReadVarint64(&form.field)) {
    return false;
  }
  tag = in.ReadTag();
  if (tag == Tag(Chunk::kOffsetFieldNumber, WireFormatLite::WIRETYPE_VARINT)) {
    if (!in.ReadVarint64(&form.offset)) return false;
    tag = in.ReadTag();
  }
  if (tag != Tag(Chunk::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED) ||
      !in.ReadVarint64(&data_bytes)) {
    return false;
  }
  form.data_at = in.CurrentPosition();
  form.data_bytes = message_bytes - form.data_at;
  return chunk_bytes == static_cast<uint64_t>(message_bytes - chunk_at) &&
         data_bytes == static_cast<uint64_t>(form.data_bytes) && form.data_bytes > 0 &&
         form.data_bytes <= kMaxChunkBytes;
}

std::byte* FindTarget(absl::Span<const ChunkTarget> targets, const ChunkForm& chunk) {
  for (const ChunkTarget& target : targets) {
    if (target.field != chunk.field) continue;
    if (chunk.offset > static_cast<uint64_t>(target.bytes)) return nullptr;
    const auto offset = static_cast<int64_t>(chunk.offset);
    return chunk.data_bytes <= target.bytes - offset ? target.to + offset : nullptr;
  }
  return nullptr;
}

std::byte* ChunkPlacer::PlaceOf(int64_t index, absl::Span<const uint8_t> beginning,
                                int64_t message_bytes, int64_t came) {
  ChunkForm chunk;
  if (!ParseChunkForm(beginning, message_bytes, chunk)) return nullptr;
  std::byte* to = where_(chunk);
  if (to == nullptr) return nullptr;
  const int64_t delivered = came - chunk.data_at;
  absl::MutexLock lock(&mutex_);
  placed_.push_back({.index = index, .chunk = chunk, .delivered = delivered});
  return to + delivered;
}

void ChunkPlacer::OnPlaced(int64_t index) {
  absl::MutexLock lock(&mutex_);
  // One message of a stream comes after the other; an older one is not completed any more.
  if (!placed_.empty() && placed_.back().index == index) placed_.back().complete = true;
}

absl::optional<int64_t> ChunkPlacer::DeliveredBytes(int64_t index, uint64_t field, uint64_t offset,
                                                    int64_t data_bytes) {
  absl::MutexLock lock(&mutex_);
  while (!placed_.empty() && placed_.front().index < index) placed_.pop_front();
  if (placed_.empty() || placed_.front().index != index) return data_bytes;
  const Placed& placed = placed_.front();
  const bool same = placed.chunk.field == field && placed.chunk.offset == offset &&
                    placed.chunk.data_bytes == data_bytes;
  if (!same || !placed.complete) return absl::nullopt;
  return placed.delivered;
}

}  // namespace attnd
