// DecodeReply: lands one reply message in the caller's arrays, with one copy from gRPC's slices to
// where each byte is wanted. Fields may come in any order; those unknown are skipped, since a newer
// server may say more. A payload that is missing, stands twice, was not asked for or has another
// size than the problem implies is DATA_LOSS naming it: what has been written so far is then
// meaningless. Any thread.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/strided_runs.h"
#include "client/shards/shard_receipt.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// A payload that the reply must hold, and where it goes.
struct ReplyPayload {
  int field_number;
  const char* name;  // the wire's, for errors
  StridedRuns runs;
  void* tensor;
};

// Holds a reply's fields beside its payloads.
struct ReplyHeader {
  ShardReceipt receipt;
  v1::Residual residual;  // without a token: none
  v1::CapturedMap captured;
};

// Lands the next `bytes` bytes of `in`; false when it ends before.
bool ScatterFrom(google::protobuf::io::CodedInputStream& in, int64_t bytes, RunCursor& cursor);

absl::Status DecodeReply(const grpc::ByteBuffer& message, absl::Span<const ReplyPayload> payloads,
                         ReplyHeader& header);

}  // namespace attnd
