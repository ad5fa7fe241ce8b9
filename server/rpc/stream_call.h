// A ForwardStream or BackwardStream: a header, then payloads in chunks, then half-close; back, the
// same.
//
//   header → Decode → Admit, places in staging memory → chunks land in them → Submit → chunks back
//
// Nothing of a payload is read before the call is admitted. A chunk is copied to its place by the
// thread that received it, while gRPC already reads the next one. CallWatch cuts a peer that
// neither sends nor reads.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>

#include "attention/problem.h"
#include "server/rpc/service_deps.h"

namespace attnd {

// The reactor deletes itself when gRPC is done with it.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartStreamCall(
    const ServiceDeps& deps, grpc::CallbackServerContext& context, Direction direction,
    uint64_t id);

}  // namespace attnd
