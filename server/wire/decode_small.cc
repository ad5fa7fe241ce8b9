#include "server/wire/decode_small.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/slice.h>

#include "base/status_macros.h"
#include "proto/attnd/v1/wire_format.h"
#include "server/call/message_bytes.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status NoMessage() {
  return FieldError(reason::kMalformedMessage, "message", "a protobuf message",
                    "bytes that are none");
}

}  // namespace

absl::Status CheckWhole(const grpc::ByteBuffer& request) {
  if (request.Valid()) return absl::OkStatus();
  return FieldError(reason::kMalformedMessage, "message", "a whole message", "a part of one");
}

absl::Status DecodeSmall(const grpc::ByteBuffer& buffer, RequestRoom room,
                         google::protobuf::Message& request) {
  const MessageBytes bytes(buffer);
  return DecodePart(bytes, {0, bytes.size()}, "", kMaxStringBytes, room, request);
}

absl::Status DecodePart(const MessageBytes& bytes, ByteRange range, absl::string_view path,
                        int64_t max_string_bytes, RequestRoom room,
                        google::protobuf::Message& request) {
  ASSIGN_OR_RETURN(const FieldTable table,
                   CheckWire(bytes, range, *request.GetDescriptor(),
                             {.path = path, .max_string_bytes = max_string_bytes}));
  RETURN_IF_ERROR(room(table.object_bytes));
  MessageBytes::Stream stream(bytes, range);
  return request.ParseFromZeroCopyStream(&stream) ? absl::OkStatus() : NoMessage();
}

absl::Status CheckEmpty(const grpc::ByteBuffer& buffer) {
  const MessageBytes bytes(buffer);
  MessageBytes::Stream stream(bytes, {0, bytes.size()});
  google::protobuf::io::CodedInputStream in(&stream);
  while (const uint32_t tag = in.ReadTag()) {
    if (!SkipValue(in, tag)) return NoMessage();
  }
  return in.ConsumedEntireMessage() ? absl::OkStatus() : NoMessage();
}

grpc::ByteBuffer EncodeSmall(const google::protobuf::Message& reply) {
  grpc::Slice slice(reply.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace attnd
