// MessageBytes: one received message as the slices in which gRPC hands it over, never made
// contiguous. Headers are parsed through Stream; payloads are found as ranges and copied out once,
// by landing. Any thread may read one.
//
// The slices go with the grpc::ByteBuffer that holds them, never one by one: when memory for
// receiving is short, gRPC 1.51 has something to do where the last reference to a slice goes, and
// only the end of a buffer is prepared for that (an ExecCtx; elsewhere the process crashes).
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

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
  // Shares the slices of `buffer`, which is empty for an empty message.
  explicit MessageBytes(const grpc::ByteBuffer& buffer);
  MessageBytes(MessageBytes&& other) noexcept { *this = std::move(other); }
  MessageBytes& operator=(MessageBytes&& other) noexcept;

  int64_t size() const { return starts_.empty() ? 0 : starts_.back(); }

  // Calls `piece` with the contiguous pieces of `range` in order. `range` lies inside the message.
  void ForEachPiece(ByteRange range,
                    const std::function<void(absl::Span<const uint8_t>)>& piece) const;

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
    size_t piece_;  // the piece that holds position_, or one before it
  };

 private:
  size_t PieceAt(int64_t offset) const;  // index of the piece that holds the byte at `offset`

  grpc::ByteBuffer buffer_;
  std::vector<absl::Span<const uint8_t>> pieces_;  // its slices that are not empty
  std::vector<int64_t> starts_;  // starts_[n] is piece n's first byte; the last entry is the total
};

}  // namespace attnd
