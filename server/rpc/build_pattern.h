// BuildPattern: from a kept attention map, or averages that the caller sends, to a list of blocks;
// ReleaseCapture: frees kept maps. Any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/keep/map_table.h"

namespace attnd {

// `request`: an attnd.v1.BuildPatternRequest. INVALID_ARGUMENT naming the field;
// FAILED_PRECONDITION CAPTURE_LOST. The map of 4096 rows and keys takes half a second.
absl::StatusOr<v1::BuildPatternResponse> BuildPatternOfCaller(const grpc::ByteBuffer& request,
                                                              absl::string_view caller,
                                                              MapTable& maps);

// `request`: an attnd.v1.ReleaseCaptureRequest.
absl::Status ReleaseCapture(const grpc::ByteBuffer& request, absl::string_view caller,
                            MapTable& maps);

}  // namespace attnd
