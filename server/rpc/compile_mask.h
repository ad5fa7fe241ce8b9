// CompileMask: what a mask by description shows, and how each device would run calls with it. It
// takes as long as a mask does to compile; any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/rpc/service_deps.h"

namespace attnd {

// `request`: an attnd.v1.CompileMaskRequest. Errors: those of decoding a problem.
absl::StatusOr<v1::CompileMaskResponse> CompileMask(const grpc::ByteBuffer& request,
                                                    absl::string_view caller,
                                                    const ServiceDeps& deps);

}  // namespace attnd
