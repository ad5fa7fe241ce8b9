// A ForwardStream or BackwardStream: a header, then payloads in chunks, then half-close; back, the
// same.
//
//   header → Decode → Admit, places in staging memory → chunks land in them → Submit → chunks back
//
// Nothing of a payload is read before the call is admitted. Chunks are read from the socket to
// their places (base/payload_receiver.h); one that began to arrive before there were any is copied,
// on the thread that received it, while gRPC already reads the next one. StreamWatch cuts a peer
// who neither sends nor reads.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>

#include "attention/problem.h"
#include "server/service_deps.h"

namespace attnd {

// The reactor deletes itself when gRPC is done with it.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartStreamCall(
    const ServiceDeps& deps, grpc::CallbackServerContext& context, Direction direction,
    uint64_t id);

}  // namespace attnd
