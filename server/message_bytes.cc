#include "server/message_bytes.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace attnd {

MessageBytes::MessageBytes(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {
  std::erase_if(slices_, [](const grpc::Slice& slice) { return slice.size() == 0; });
  int64_t total = 0;
  for (const grpc::Slice& slice : slices_) {
    starts_.push_back(total);
    total += static_cast<int64_t>(slice.size());
  }
  starts_.push_back(total);
}

absl::StatusOr<MessageBytes> MessageBytes::From(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Valid()) return MessageBytes(std::move(slices));  // an empty message
  grpc::Status status = buffer.Dump(&slices);
  if (!status.ok()) return absl::InternalError(status.error_message());
  return MessageBytes(std::move(slices));
}

size_t MessageBytes::SliceAt(int64_t offset) const {
  auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

void MessageBytes::ForEachPiece(ByteRange range,
                                const std::function<void(absl::Span<const uint8_t>)>& piece) const {
  if (range.size == 0) return;
  CHECK(range.offset >= 0 && range.offset + range.size <= size());
  size_t n = SliceAt(range.offset);
  int64_t position = range.offset, end = range.offset + range.size;
  for (; position < end; ++n) {
    int64_t skip = position - starts_[n];
    int64_t take = std::min(starts_[n + 1], end) - position;
    piece(absl::MakeConstSpan(slices_[n].begin() + skip, static_cast<size_t>(take)));
    position += take;
  }
}

absl::Span<const uint8_t> MessageBytes::Beginning() const {
  if (slices_.empty()) return {};
  return absl::MakeConstSpan(slices_.front().begin(), slices_.front().size());
}

MessageBytes::Stream::Stream(const MessageBytes& message, ByteRange range)
    : message_(message),
      begin_(range.offset),
      end_(range.offset + range.size),
      position_(range.offset),
      slice_(range.size == 0 ? 0 : message.SliceAt(range.offset)) {
  CHECK(range.offset >= 0 && end_ <= message.size());
}

bool MessageBytes::Stream::Next(const void** data, int* size) {
  if (position_ >= end_) return false;
  while (slice_ > 0 && message_.starts_[slice_] > position_) --slice_;  // after BackUp
  while (message_.starts_[slice_ + 1] <= position_) ++slice_;
  int64_t take = std::min(message_.starts_[slice_ + 1], end_) - position_;
  take = std::min<int64_t>(take, std::numeric_limits<int>::max());
  *data = message_.slices_[slice_].begin() + (position_ - message_.starts_[slice_]);
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
