// Decode and encode of the calls that carry no tensors (residual calls, GetServerInfo), as strict
// as decode.h. A message that cannot be parsed is INVALID_ARGUMENT; gRPC's own parsing would answer
// UNIMPLEMENTED without a text. Any thread.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/call/message_bytes.h"
#include "server/wire/wire_check.h"

namespace attnd {

// Checks a unary request as gRPC gives it: without a buffer where the peer ended the call within
// the message. MALFORMED_MESSAGE; it is not the empty message.
absl::Status CheckWhole(const grpc::ByteBuffer& request);

// Fills `request`. Unknown, repeated and truncated fields are INVALID_ARGUMENT naming the field.
absl::Status DecodeSmall(const grpc::ByteBuffer& bytes, RequestRoom room,
                         google::protobuf::Message& request);
// Decodes one message inside another, called `path` in errors; strings may have so many bytes.
absl::Status DecodePart(const MessageBytes& bytes, ByteRange range, absl::string_view path,
                        int64_t max_string_bytes, RequestRoom room,
                        google::protobuf::Message& request);

// Checks a request without fields: those of a newer client pass. Nothing is kept.
absl::Status CheckEmpty(const grpc::ByteBuffer& bytes);

grpc::ByteBuffer EncodeSmall(const google::protobuf::Message& reply);

}  // namespace attnd
