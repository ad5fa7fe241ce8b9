#include "server/call/message_bytes.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace attnd {

MessageBytes::MessageBytes(const grpc::ByteBuffer& buffer) : buffer_(buffer) {
  int64_t total = 0;
  grpc::ProtoBufferReader reader(&buffer_);
  const void* data = nullptr;
  for (int size = 0; reader.Next(&data, &size);) {
    if (size == 0) continue;
    pieces_.emplace_back(static_cast<const uint8_t*>(data), static_cast<size_t>(size));
    starts_.push_back(total);
    total += size;
  }
  starts_.push_back(total);
}

MessageBytes& MessageBytes::operator=(MessageBytes&& other) noexcept {
  buffer_.Swap(&other.buffer_);
  pieces_.swap(other.pieces_);
  starts_.swap(other.starts_);
  return *this;
}

size_t MessageBytes::PieceAt(int64_t offset) const {
  auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

void MessageBytes::ForEachPiece(ByteRange range,
                                const std::function<void(absl::Span<const uint8_t>)>& piece) const {
  if (range.size == 0) return;
  CHECK(range.offset >= 0 && range.offset + range.size <= size());
  size_t n = PieceAt(range.offset);
  int64_t position = range.offset, end = range.offset + range.size;
  for (; position < end; ++n) {
    int64_t skip = position - starts_[n];
    int64_t take = std::min(starts_[n + 1], end) - position;
    piece(absl::MakeConstSpan(pieces_[n].data() + skip, static_cast<size_t>(take)));
    position += take;
  }
}

MessageBytes::Stream::Stream(const MessageBytes& message, ByteRange range)
    : message_(message),
      begin_(range.offset),
      end_(range.offset + range.size),
      position_(range.offset),
      piece_(range.size == 0 ? 0 : message.PieceAt(range.offset)) {
  CHECK(range.offset >= 0 && end_ <= message.size());
}

bool MessageBytes::Stream::Next(const void** data, int* size) {
  if (position_ >= end_) return false;
  while (piece_ > 0 && message_.starts_[piece_] > position_) --piece_;  // after BackUp
  while (message_.starts_[piece_ + 1] <= position_) ++piece_;
  int64_t take = std::min(message_.starts_[piece_ + 1], end_) - position_;
  take = std::min<int64_t>(take, std::numeric_limits<int>::max());
  *data = message_.pieces_[piece_].data() + (position_ - message_.starts_[piece_]);
  *size = static_cast<int>(take);
  position_ += take;
  return true;
}

bool MessageBytes::Stream::Skip(int count) {
  int64_t target = position_ + count;
  position_ = std::min(target, end_);
  return target <= end_;
}

}  // namespace attnd
