// Encode: Result → Reply, a protobuf message as gRPC slices: one small slice with the receipt, the
// lease and the tags, and slices that wrap the staging memory itself. Nothing of a tensor is
// copied; memory and ticket come back when gRPC lets go of the last slice, and `progress` counts
// what it has let go. Any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/transfer_progress.h"
#include "server/keep/lease_table.h"
#include "server/schedule/result.h"

namespace attnd {

struct Reply {
  grpc::ByteBuffer bytes;  // attnd.v1.ForwardResponse or BackwardResponse
  int64_t payload_bytes = 0;
};

v1::Residual EncodeLease(const LeaseGrant& lease);

Reply Encode(Result result, const BackendInfo& engine, absl::Time now,
             const std::shared_ptr<TransferProgress>& progress);

// The same as the messages of a streamed reply, in order: the header, then chunks of at most
// `chunk_bytes` of data.
std::vector<grpc::ByteBuffer> EncodeStream(Result result, const BackendInfo& engine, absl::Time now,
                                           int64_t chunk_bytes,
                                           const std::shared_ptr<TransferProgress>& progress);

}  // namespace attnd
