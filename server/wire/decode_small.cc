#include "server/wire/decode_small.h"

#include <grpcpp/support/slice.h>

#include <string>

#include "base/status_macros.h"
#include "server/call/message_bytes.h"
#include "server/call/status_details.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

absl::Status Parse(const MessageBytes& bytes, ByteRange range, google::protobuf::Message& request) {
  MessageBytes::Stream stream(bytes, range);
  if (request.ParseFromZeroCopyStream(&stream)) return absl::OkStatus();
  return FieldError(reason::kMalformedMessage, "message", "a protobuf message",
                    "bytes that are none");
}

}  // namespace

absl::Status CheckWhole(const grpc::ByteBuffer& request) {
  if (request.Valid()) return absl::OkStatus();
  return FieldError(reason::kMalformedMessage, "message", "a whole message", "a part of one");
}

absl::Status DecodeSmall(const grpc::ByteBuffer& buffer, google::protobuf::Message& request) {
  const MessageBytes bytes(buffer);
  RETURN_IF_ERROR(CheckWire(bytes, {0, bytes.size()}, *request.GetDescriptor()).status());
  return Parse(bytes, {0, bytes.size()}, request);
}

absl::Status DecodePart(const MessageBytes& bytes, ByteRange range, absl::string_view path,
                        int64_t max_string_bytes, google::protobuf::Message& request) {
  RETURN_IF_ERROR(CheckWire(bytes, range, *request.GetDescriptor(),
                            {.path = path, .max_string_bytes = max_string_bytes})
                      .status());
  return Parse(bytes, range, request);
}

absl::Status DecodeLenient(const grpc::ByteBuffer& buffer, google::protobuf::Message& request) {
  const MessageBytes bytes(buffer);
  return Parse(bytes, {0, bytes.size()}, request);
}

grpc::ByteBuffer EncodeSmall(const google::protobuf::Message& reply) {
  grpc::Slice slice(reply.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace attnd
