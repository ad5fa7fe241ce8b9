// SharedTensors: one RPC's tensors in memory shared with the daemon. Those that lie there already,
// in one piece and aligned, stay where they are; the others get places in one block: inputs are
// copied into it, once, and outputs out of it when the reply has come. One thread at a time.
// SharedRequest: those of a shard of attention; an Encoder of LogicalCall.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/problem.h"
#include "attention/strided_runs.h"
#include "client/call/reply_decoder.h"
#include "client/call/shared_memory.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

class SharedTensors {
 public:
  // The bytes of a smaller message are sent as fast as they are copied.
  static constexpr int64_t kFewBytes = int64_t{64} << 10;

  // `memory` outlives it.
  explicit SharedTensors(SharedMemory& memory) : memory_(memory) {}

  void AddInput(v1::TensorName name, const StridedRuns& runs, const void* tensor);
  void AddOutput(v1::TensorName name, const StridedRuns& runs, void* tensor);
  // Finds places for all and copies the inputs; false when there is no memory for them.
  bool Place();

  const v1::SharedMemory& message() const { return message_; }
  bool has_outputs() const { return !tensors_.empty() && tensors_.back().output; }
  int64_t input_bytes() const { return input_bytes_; }
  int64_t copied_bytes() const { return copied_bytes_; }  // of the inputs
  // Copies the outputs to where they are wanted.
  void Land();

 private:
  struct Tensor {
    v1::TensorName name;
    StridedRuns runs;
    const void* tensor;
    bool output;
    int64_t at = -1;  // in the block; -1: lies in place
  };
  void Name(const Tensor& tensor, const SharedPlaceOf& place);

  SharedMemory& memory_;
  std::vector<Tensor> tensors_;
  std::shared_ptr<std::byte> block_;  // also the region's
  v1::SharedMemory message_;
  int64_t input_bytes_ = 0;
  int64_t copied_bytes_ = 0;
};

class SharedRequest : public SharedTensors {
 public:
  SharedRequest(SharedMemory& memory, Direction direction)
      : SharedTensors(memory), direction_(direction) {}

  // An input, by its field in the request.
  void AddPayload(int field_number, const StridedRuns& runs, const void* tensor);
  void AddOutput(const ReplyPayload& output);

 private:
  const Direction direction_;
};

}  // namespace attnd
