// RequestEncoder: one request message as slices. The header is protobuf's own bytes; each payload
// is a tag and a length, then the tensor from where it lies (BorrowedSlices), copied only where it
// lies in runs too small to be worth a slice each.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/strided_runs.h"
#include "client/call/borrowed_slices.h"

namespace attnd {

// Runs at least this long are sent in place. A slice costs about what copying 4 KiB costs.
inline constexpr int64_t kMinRunInPlace = 8 << 10;

class RequestEncoder {
 public:
  // `header`: serialised fields that come before the payloads.
  RequestEncoder(std::string header, BorrowedSlices& borrowed);

  // The next payload: bytes field `field_number` with the runs of `tensor`.
  void AddPayload(int field_number, const StridedRuns& runs, const void* tensor);

  grpc::ByteBuffer Finish();

  int64_t payload_bytes() const { return payload_bytes_; }
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  void FlushSmall();

  BorrowedSlices& borrowed_;
  std::string small_;  // what goes into the next owned slice
  std::vector<grpc::Slice> slices_;
  int64_t payload_bytes_ = 0;
  int64_t copied_bytes_ = 0;
};

}  // namespace attnd
