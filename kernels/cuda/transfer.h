// Transfer: a call's tensors into a launch's arena, as the kernels want them, and results back, as
// the caller wants them. What is not already as the kernels want it (bfloat16, rows of no whole 16
// bytes) is changed on the host, in the call's workspace; neighbours and like calls are one copy
// (CopyMerger).
//
//   In, for each call → FlushIn → (kernels) → Out, for each call → FlushOut → (Finish) → Convert
//
// One launch's worth; one thread. Errors: the device's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/copy_merger.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/cuda/layout/launch_layout.h"
#include "kernels/cuda/layout/staging.h"

namespace attnd::cuda {

// Whether what a forward leaves on the device serves backward with the bits of tensors that are
// sent again. Not of float32 as halves, nor of bfloat16 with hardly anything kept by dropout: V
// is then so small in forward that its least numbers lose bits which backward would still see.
bool CanKeep(const Problem& problem, Travel travel);

// Bytes of host memory that In and Out need for a call. `by_classes`: CallLayout::classes.
int64_t TransferScratchBytes(const Problem& problem, Direction direction, Travel travel,
                             bool by_classes);

class Transfer {
 public:
  Transfer(DeviceLaunch& launch, int64_t arena_bytes)
      : launch_(launch), arena_bytes_(arena_bytes) {}

  // `parts` are the call's own, and stay; what is converted has its exponents set here.
  absl::Status In(const CallLayout& at, const ForwardCall& call, absl::Span<Part> parts);
  absl::Status In(const CallLayout& at, const BackwardCall& call, absl::Span<Part> parts);
  // Copies in what a capture reads of a forward that has run (LayOutScores).
  absl::Status ScoresIn(const CallLayout& at, const ForwardCall& call, absl::Span<Part> parts);
  absl::Status FlushIn();
  absl::Status Out(const CallLayout& at, const ForwardCall& call, absl::Span<const Part> parts);
  absl::Status Out(const CallLayout& at, const BackwardCall& call, absl::Span<const Part> parts);
  absl::Status FlushOut();
  // Once everything has arrived.
  void Convert();

 private:
  // A tensor of rows, and one exponent for each part.
  struct Rows {
    RowShape shape;
    bool is_query;
    int64_t offset;  // in the arena
    std::vector<int> exponents;
  };

  // Q, K, V and what scores need; the largest V becomes 2^value_bits.
  absl::Status InputsIn(const CallLayout& at, const ForwardCall& call, int value_bits,
                        absl::Span<Part> parts);
  absl::Status MaskAndBiasIn(const CallLayout& at, const ForwardCall& call);
  // Copies in what backward needs of forward, in the scales of backward.
  absl::Status ForwardIn(const CallLayout& at, const BackwardCall& call, absl::Span<Part> parts);
  absl::Status RowsIn(const Rows& rows, const void* from, const Problem& p,
                      absl::Span<const Part> parts);
  // Rows that the kernels wrote in the call's element type.
  absl::Status RowsOut(const RowShape& shape, void* to, int64_t offset);
  // O, which is float16 times powers of two where the call is bfloat16.
  absl::Status OutputOut(const Rows& rows, void* to, const Problem& p,
                         absl::Span<const Part> parts);
  // Copies in a tensor of lse's shape, as the call's kernels have it.
  absl::Status LseIn(const CallLayout& at, const float* from, int64_t offset);
  absl::Status DLseIn(const CallLayout& at, const BackwardCall& call, absl::Span<const Part> parts);
  void BeginCall(const CallLayout& at, std::byte* workspace);
  // A number of the allocation in which these bytes lie: the launch's arena, or a call's own.
  int AllocationOf(int64_t offset) const;
  absl::Status BytesIn(int64_t offset, const void* from, int64_t bytes);
  absl::Status BytesOut(void* to, int64_t offset, int64_t bytes);
  std::byte* TakeScratch(int64_t bytes);

  DeviceLaunch& launch_;
  const int64_t arena_bytes_;
  Travel travel_ = Travel::kAsHalves;  // of the call at hand
  int call_ = 0;                       // the number of the one at hand, from 1
  CopyMerger copies_;                  // in the direction of the phase
  std::byte* scratch_ = nullptr;       // of the call at hand, what is left of it
  std::vector<std::function<void()>> conversions_;
};

}  // namespace attnd::cuda
