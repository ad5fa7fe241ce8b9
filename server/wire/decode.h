// Decode: untrusted bytes → AttentionCall. All fields are checked here: what comes out is valid,
// and its payloads have exactly the sizes that its Problem implies. No memory is allocated from a
// declared size before that is known. Payload bytes are not read.
//
// The header of a streamed call is the same message without payloads.
// Errors: INVALID_ARGUMENT "field: expected ..., got ..."; FAILED_PRECONDITION for the id of a mask
// that is not known; those of `room`; where `masks` asks for it, CANCELLED instead of what takes
// long. Any thread.
#pragma once

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "server/call/call.h"
#include "server/call/message_bytes.h"
#include "server/keep/mask_table.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace v1 {
class CallOptions;
}  // namespace v1

class Decoder {
 public:
  // All of `message` is an attnd.v1.ForwardRequest or BackwardRequest on the wire.
  static absl::StatusOr<AttentionCall> Decode(MessageBytes message, Direction direction,
                                              const CallersMasks& masks, RequestRoom room);
  // The same message without payloads, the header of a streamed call, in `range` of `message`. The
  // call's inputs have sizes, but no bytes yet.
  static absl::StatusOr<AttentionCall> DecodeHeader(const MessageBytes& message, ByteRange range,
                                                    Direction direction, const CallersMasks& masks,
                                                    RequestRoom room);

  // The request_id of a message that need not be right, for the log: at most kMaxStringBytes of it,
  // "" when none is found.
  static std::string RequestIdOf(const MessageBytes& message, ByteRange range);

 private:
  enum class Form { kWhole, kHeader };
  static absl::StatusOr<AttentionCall> DecodeIn(const MessageBytes& message, ByteRange range,
                                                Direction direction, const CallersMasks& masks,
                                                RequestRoom room, Form form);
  static void TakeOptions(v1::CallOptions& options, AttentionCall& call);
};

}  // namespace attnd
