// BuildPattern: from a kept attention map, or averages that the caller sends, to a list of blocks;
// ReleaseCapture: frees kept maps. Any thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/keep/map_table.h"
#include "server/rpc/small_call.h"

namespace attnd {

// `call`: of an attnd.v1.BuildPatternRequest. INVALID_ARGUMENT naming the field;
// FAILED_PRECONDITION CAPTURE_LOST. The map of 4096 rows and keys takes half a second.
absl::StatusOr<v1::BuildPatternResponse> BuildPatternOfCaller(SmallCall& call, MapTable& maps);

// `call`: of an attnd.v1.ReleaseCaptureRequest.
absl::Status ReleaseCapture(SmallCall& call, MapTable& maps);

}  // namespace attnd
