// StreamReply: lands the messages of one streamed reply as they come, with the rules and the one
// copy of DecodeReply: a gap, a payload that was not asked for, or one that is not complete at the
// end is DATA_LOSS. One thread at a time; the arrays outlive it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/call/reply_decoder.h"
#include "client/call/reply_landings.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

class StreamReply {
 public:
  explicit StreamReply(const std::vector<ReplyPayload>& payloads);
  // For calls other than attention's, whose messages have the same parts: `take_header` is given
  // the header's bytes, and header() stays empty.
  using TakeHeader = std::function<absl::Status(const std::string& bytes)>;
  StreamReply(const std::vector<ReplyPayload>& payloads, TakeHeader take_header);
  // One of several streams of a reply, whose chunks land there; outlives it.
  StreamReply(ReplyLandings& landings, TakeHeader take_header);
  StreamReply(StreamReply&&) = delete;

  // The stream's next message.
  absl::Status Take(const grpc::ByteBuffer& message);
  // After the last message.
  absl::Status CheckComplete() const;
  const ReplyHeader& header() const { return header_; }

 private:
  struct Landing {
    ReplyPayload payload;
    RunCursor cursor;
    int64_t received = 0;
  };
  absl::Status ReadHeader(google::protobuf::io::CodedInputStream& in, int64_t bytes);
  absl::Status TakeChunk(google::protobuf::io::CodedInputStream& in);
  absl::Status TakeData(google::protobuf::io::CodedInputStream& in, uint64_t tensor,
                        uint64_t offset, uint64_t bytes);

  const TakeHeader take_header_;
  ReplyLandings* const shared_ = nullptr;  // null: all chunks come in this stream
  std::vector<Landing> landings_;
  ReplyHeader header_;
  bool has_header_ = false;
};

}  // namespace attnd
