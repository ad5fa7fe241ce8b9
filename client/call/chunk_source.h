// ChunkSource: the messages of one streamed request, made one at a time: the header, then each
// payload in chunks. A chunk's data are slices over the tensor where it lies (BorrowedSlices), or
// gathered where the tensor lies in runs too small to be worth a slice each. One thread at a time;
// the tensors outlive these slices.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/strided_runs.h"
#include "client/call/borrowed_slices.h"

namespace attnd {

class ChunkSource {
 public:
  // `header`: the request's message without payloads. `chunk_bytes`: most data of a chunk.
  ChunkSource(std::string header, BorrowedSlices& borrowed, int64_t chunk_bytes);

  // The next payload: bytes field `field_number` with the runs of `tensor`.
  void AddPayload(int field_number, const StridedRuns& runs, const void* tensor);

  bool done() const { return !header_left_ && current_ == payloads_.size(); }
  grpc::ByteBuffer Next();  // not when done()

  int64_t payload_bytes() const { return payload_bytes_; }  // of all payloads
  int64_t copied_bytes() const { return copied_bytes_; }    // gathered so far

 private:
  struct Payload {
    int field_number;
    StridedRuns runs;
    const std::byte* tensor;
  };
  void AppendData(const Payload& payload, int64_t bytes, std::vector<grpc::Slice>& slices);

  const std::string header_;
  BorrowedSlices& borrowed_;
  const int64_t chunk_bytes_;
  std::vector<Payload> payloads_;
  bool header_left_ = true;
  size_t current_ = 0;  // payload
  int64_t offset_ = 0;  // in it
  int64_t payload_bytes_ = 0;
  int64_t copied_bytes_ = 0;
};

}  // namespace attnd
