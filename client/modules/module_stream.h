// RunStream: one streamed RPC about a module, driven on its caller's thread: the request's messages
// are written and the reply's are read beside each other, until the server has said how it ended.
//
// Payloads are kept: gRPC may hold a slice after the RPC has ended, and holds the memory with it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/call/unary_call.h"
#include "client/channels/grpc_status.h"
#include "client/modules/kept_bytes.h"
#include "client/types/call_options.h"
#include "google/protobuf/message_lite.h"

namespace attnd {

struct StreamedPayload {
  int field_number;
  KeptBytes bytes;
};

// The chunks of a request's payloads, each a message. Any thread.
class OutgoingChunks {
 public:
  explicit OutgoingChunks(std::vector<StreamedPayload> payloads);

  bool done() const;
  // nullopt: none is left. `last`: none is left behind it.
  std::optional<grpc::ByteBuffer> Next(bool& last);

 private:
  mutable absl::Mutex mutex_;
  std::vector<StreamedPayload> payloads_ ABSL_GUARDED_BY(mutex_);  // the next one last
  int64_t offset_ ABSL_GUARDED_BY(mutex_) = 0;
};

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

}  // namespace attnd
