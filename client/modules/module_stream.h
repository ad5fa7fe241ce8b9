// RunStream: one streamed RPC about a module, driven on its caller's thread: the request's messages
// are written and the reply's are read beside each other, until the server has said how it ended.
//
// Payloads are kept: gRPC may hold a slice after the RPC has ended, and holds the memory with it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/channels/grpc_status.h"
#include "client/modules/kept_bytes.h"
#include "client/types/call_options.h"

namespace attnd {

struct StreamedPayload {
  int field_number;
  KeptBytes bytes;
};

// The messages of a request: its header, then each payload that is not empty in chunks.
class PayloadMessages {
 public:
  PayloadMessages(std::string header, std::vector<StreamedPayload> payloads);
  bool done() const { return !header_left_ && current_ == payloads_.size(); }
  grpc::ByteBuffer Next();  // not when done()

 private:
  void SkipEmpty();

  const std::string header_;
  const std::vector<StreamedPayload> payloads_;
  bool header_left_ = true;
  size_t current_ = 0;
  int64_t offset_ = 0;
};

struct StreamEnds {
  // The next message of the request; `last` is set with the last one.
  std::function<grpc::ByteBuffer(bool& last)> next;
  // Each message of the reply; an error ends the RPC.
  std::function<absl::Status(grpc::ByteBuffer& message)> take;
};

// `bytes`: how many travel, for the choice of a connection. `pushback`: what the server wishes of
// retries, also after an error.
absl::Status RunStream(const ClientCore& core, int address, const std::string& method,
                       int64_t bytes, const StreamEnds& ends, absl::Time deadline,
                       const CallOptions& options, Pushback& pushback);

}  // namespace attnd
