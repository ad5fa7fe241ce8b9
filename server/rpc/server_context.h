// Reads and adds to gRPC's context of a call, for the handlers of all services. Any thread.
#pragma once

#include <grpcpp/server_context.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/metrics/trace_context.h"

namespace attnd {

// As gRPC holds it: std::chrono's system clock ends in 2262, and callers for whom a deadline is a
// formality are beyond that.
absl::Time DeadlineOf(const grpc::ServerContextBase& context);

// That of the caller's span, if it sends one.
TraceContext TraceOf(const grpc::ServerContextBase& context);

// The trailer that says when to come back, if the status says so. Before the call is finished.
void AddPushback(const absl::Status& status, grpc::ServerContextBase& context);

}  // namespace attnd
