#include "client/call/stream_reply.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/wire_format.h"

namespace attnd {
namespace {

using google::protobuf::io::CodedInputStream;
using Message = v1::ForwardStreamResponse;  // backward's has the same parts
using Chunk = v1::PayloadChunk;

absl::Status MalformedStream(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("reply: ", what));
}

constexpr uint32_t BytesTag(int field) { return WireTag(field, WireType::kLengthDelimited); }
constexpr uint32_t VarintTag(int field) { return WireTag(field, WireType::kVarint); }

}  // namespace

StreamReply::StreamReply(const std::vector<ReplyPayload>& payloads)
    : StreamReply(payloads, [this](const std::string& bytes) {
        grpc::Slice slice(bytes);
        return DecodeReply(grpc::ByteBuffer(&slice, 1), {}, header_);
      }) {}

StreamReply::StreamReply(const std::vector<ReplyPayload>& payloads, TakeHeader take_header)
    : take_header_(std::move(take_header)) {
  for (const ReplyPayload& payload : payloads) {
    landings_.push_back(
        {payload, RunCursor(payload.runs, static_cast<std::byte*>(payload.tensor))});
  }
}

StreamReply::StreamReply(ReplyLandings& landings, TakeHeader take_header)
    : take_header_(std::move(take_header)), shared_(&landings) {}

absl::Status StreamReply::Take(const grpc::ByteBuffer& message) {
  grpc::ByteBuffer slices = message;  // the reader consumes its buffer
  grpc::ProtoBufferReader reader(&slices);
  if (!reader.status().ok()) return MalformedStream(reader.status().error_message());
  CodedInputStream in(&reader);
  while (uint32_t tag = in.ReadTag()) {
    uint32_t size;
    if (tag != BytesTag(Message::kHeaderFieldNumber) &&
        tag != BytesTag(Message::kChunkFieldNumber)) {
      if (!SkipValue(in, tag)) return MalformedStream("a field that cannot be skipped");
      continue;
    }
    if (!in.ReadVarint32(&size)) return MalformedStream("a part without a length");
    if (tag == BytesTag(Message::kHeaderFieldNumber)) {
      RETURN_IF_ERROR(ReadHeader(in, size));
      continue;
    }
    CodedInputStream::Limit outer = in.PushLimit(static_cast<int>(size));
    RETURN_IF_ERROR(TakeChunk(in));
    in.PopLimit(outer);
  }
  return in.ConsumedEntireMessage() ? absl::OkStatus() : MalformedStream("ends inside a field");
}

absl::Status StreamReply::ReadHeader(CodedInputStream& in, int64_t bytes) {
  std::string header;
  if (has_header_ || !in.ReadString(&header, static_cast<int>(bytes))) {
    return MalformedStream("header: stands twice or is cut off");
  }
  has_header_ = true;
  return take_header_(header);
}

// The fields come in the order of their numbers, the data last.
absl::Status StreamReply::TakeChunk(CodedInputStream& in) {
  uint64_t tensor = 0, offset = 0;
  while (uint32_t tag = in.ReadTag()) {
    if (tag == VarintTag(Chunk::kTensorFieldNumber)) {
      if (!in.ReadVarint64(&tensor)) return MalformedStream("chunk: no tensor");
    } else if (tag == VarintTag(Chunk::kOffsetFieldNumber)) {
      if (!in.ReadVarint64(&offset)) return MalformedStream("chunk: no offset");
    } else if (tag == BytesTag(Chunk::kDataFieldNumber)) {
      uint64_t size;
      if (!in.ReadVarint64(&size)) return MalformedStream("chunk: no data");
      RETURN_IF_ERROR(TakeData(in, tensor, offset, size));
    } else if (!SkipValue(in, tag)) {
      return MalformedStream("chunk: a field that cannot be skipped");
    }
  }
  return absl::OkStatus();
}

absl::Status StreamReply::TakeData(CodedInputStream& in, uint64_t tensor, uint64_t offset,
                                   uint64_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  const auto cut_off = [&] {
    return MalformedStream(absl::StrCat("chunk of field ", tensor, ": cut off"));
  };
  if (shared_ != nullptr) {
    ASSIGN_OR_RETURN(RunCursor cursor, shared_->Claim(tensor, offset, size));
    if (!ScatterFrom(in, size, cursor)) return cut_off();
    shared_->Landed(size);
    return absl::OkStatus();
  }
  auto landing = std::find_if(landings_.begin(), landings_.end(), [&](const Landing& l) {
    return static_cast<uint64_t>(l.payload.field_number) == tensor;
  });
  if (landing == landings_.end()) return MalformedStream(absl::StrCat("chunk of field ", tensor));
  const char* name = landing->payload.name;
  if (offset != static_cast<uint64_t>(landing->received)) {
    return MalformedStream(
        absl::StrCat(name, ": expected a chunk from byte ", landing->received, ", got ", offset));
  }
  const int64_t left = landing->payload.runs.total_bytes() - landing->received;
  if (bytes > static_cast<uint64_t>(left)) {
    return MalformedStream(absl::StrCat(name, ": expected at most ", left, " more bytes"));
  }
  if (!ScatterFrom(in, size, landing->cursor)) return cut_off();
  landing->received += size;
  return absl::OkStatus();
}

absl::Status StreamReply::CheckComplete() const {
  if (!has_header_) return MalformedStream("header: is missing");
  for (const Landing& landing : landings_) {
    int64_t expected = landing.payload.runs.total_bytes();
    if (landing.received == expected) continue;
    return MalformedStream(absl::StrCat(landing.payload.name, ": expected ", expected,
                                        " bytes, got ", landing.received));
  }
  return absl::OkStatus();
}

}  // namespace attnd
