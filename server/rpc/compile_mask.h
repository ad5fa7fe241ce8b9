// CompileMask: what a mask by description shows, and how each device would run calls with it. It
// takes as long as a mask does to compile; any thread.
#pragma once

#include "absl/status/statusor.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/rpc/service_deps.h"
#include "server/rpc/small_call.h"

namespace attnd {

// `call`: of an attnd.v1.CompileMaskRequest. Errors: those of decoding a problem.
absl::StatusOr<v1::CompileMaskResponse> CompileMask(SmallCall& call, const ServiceDeps& deps);

}  // namespace attnd
