// FromGrpc: a status as gRPC received it → absl::Status with the details of grpc-status-details-bin
// as payloads (error_detail.h). Any thread.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/channels/reported_load.h"

namespace attnd {

// Details that cannot be parsed are left out: code and message still tell what happened.
absl::Status FromGrpc(const grpc::Status& status);

// The server's wish in the trailer grpc-retry-pushback-ms. A negative or malformed one forbids
// retries (gRFC A6).
struct Pushback {
  bool forbids_retry = false;
  std::optional<absl::Duration> delay;
};
Pushback PushbackOf(const grpc::ClientContext& finished_call);

// The queue that the server tells of in the trailer attnd-queue-seconds. Absent: it tells nothing
// that can be a queue.
std::optional<absl::Duration> QueueOf(const grpc::ClientContext& finished_call);

std::optional<ReportedLoad> ReportedLoadOf(const grpc::ClientContext& finished_call);

}  // namespace attnd
