// RunStream: one streamed RPC about a module, driven on its caller's thread: the request's messages
// are written and the reply's are read beside each other, until the server has said how it ended.
// RunWhole: one of one message each way.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/call/unary_call.h"
#include "client/channels/grpc_status.h"
#include "client/types/call_options.h"
#include "google/protobuf/message_lite.h"

namespace attnd {

// A whole message with a request's header.
grpc::ByteBuffer HeaderMessage(const google::protobuf::MessageLite& header);

struct StreamEnds {
  // The next message of the request; `last` is set with the last one, or where there is none more.
  // nullopt without `last`: it is asked for again after each message of the reply.
  std::function<std::optional<grpc::ByteBuffer>(bool& last)> next;
  // Each message of the reply; an error ends the RPC.
  std::function<absl::Status(grpc::ByteBuffer& message)> take;
};

// `bytes`: how many travel, for the choice of a connection. `pushback`: what the server wishes of
// retries, also after an error.
absl::Status RunStream(const ClientCore& core, int address, const std::string& method,
                       const CallMetadata& metadata, int64_t bytes, const StreamEnds& ends,
                       absl::Time deadline, const CallOptions& options, Pushback& pushback);
// The reply has no bytes after an error.
absl::StatusOr<grpc::ByteBuffer> RunWhole(const ClientCore& core, int address,
                                          const std::string& method, const CallMetadata& metadata,
                                          const grpc::ByteBuffer& request, absl::Time deadline,
                                          const CallOptions& options, Pushback& pushback);

}  // namespace attnd
