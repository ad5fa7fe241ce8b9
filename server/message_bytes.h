// MessageBytes: one received message as the slices in which gRPC hands it over, never made
// contiguous. Headers are parsed through Stream; payloads are found as ranges and copied out once,
// by landing. Reference counted: copies share the slices. Any thread may read one.
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace attnd {

// Bytes [offset, offset + size) of a message.
struct ByteRange {
  int64_t offset = 0;
  int64_t size = 0;
};

class MessageBytes {
 public:
  MessageBytes() = default;
  explicit MessageBytes(std::vector<grpc::Slice> slices);
  // INTERNAL when gRPC cannot give the slices out.
  static absl::StatusOr<MessageBytes> From(const grpc::ByteBuffer& buffer);

  int64_t size() const { return starts_.empty() ? 0 : starts_.back(); }

  // Calls `piece` with the contiguous pieces of `range` in order. `range` lies inside the message.
  void ForEachPiece(ByteRange range,
                    const std::function<void(absl::Span<const uint8_t>)>& piece) const;

  // The first of those pieces.
  absl::Span<const uint8_t> Beginning() const;

  // A protobuf input over `range`; the message outlives it.
  class Stream final : public google::protobuf::io::ZeroCopyInputStream {
   public:
    Stream(const MessageBytes& message, ByteRange range);
    bool Next(const void** data, int* size) override;
    void BackUp(int count) override { position_ -= count; }
    bool Skip(int count) override;
    int64_t ByteCount() const override { return position_ - begin_; }

   private:
    const MessageBytes& message_;
    int64_t begin_, end_, position_;
    size_t slice_;  // the slice that holds position_, or one before it
  };

 private:
  size_t SliceAt(int64_t offset) const;  // index of the slice that holds the byte at `offset`

  std::vector<grpc::Slice> slices_;
  std::vector<int64_t> starts_;  // starts_[n] is slice n's first byte; the last entry is the total
};

}  // namespace attnd
