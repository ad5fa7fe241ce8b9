// A Forward or Backward in one message each way.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>

#include "attention/problem.h"
#include "server/service_deps.h"

namespace attnd {

// Decodes, admits and lands the request on this thread, and submits the call. The reactor deletes
// itself when gRPC is done with it.
grpc::ServerUnaryReactor* StartUnaryCall(const ServiceDeps& deps,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request, grpc::ByteBuffer& reply,
                                         Direction direction, uint64_t id);

}  // namespace attnd
