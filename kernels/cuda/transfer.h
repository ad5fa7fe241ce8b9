// Transfer: a call's tensors into a device's arena, as the kernels want them, and results back, as
// the caller wants them. One launch's worth: it keeps scratch between tensors. One thread.
// Errors: the device's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/kernel_device.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/staging.h"

namespace attnd::cuda {

class Transfer {
 public:
  Transfer(KernelDevice& device, uint64_t arena) : device_(device), arena_(arena) {}

  // `parts` are the call's own; in bfloat16 their exponents are set here.
  absl::Status In(const CallLayout& at, const ForwardCall& call, absl::Span<Part> parts);
  absl::Status In(const CallLayout& at, const BackwardCall& call, absl::Span<Part> parts);
  absl::Status Out(const CallLayout& at, const ForwardCall& call, absl::Span<const Part> parts);
  absl::Status Out(const CallLayout& at, const BackwardCall& call, absl::Span<const Part> parts);

 private:
  // Q, K, V and what scores need; the largest V becomes 2^value_bits.
  absl::Status InputsIn(const CallLayout& at, const ForwardCall& call, int value_bits,
                        absl::Span<Part> parts);
  // One tensor of rows; `exponents` is empty in float16, else one for each part.
  absl::Status RowsIn(const RowShape& shape, bool is_query, const void* from, int64_t offset,
                      const Problem& p, absl::Span<const Part> parts,
                      absl::Span<const int> exponents);
  // Rows that the kernels wrote in the call's element type.
  absl::Status RowsOut(const RowShape& shape, void* to, int64_t offset);
  // O, which is float16 times powers of two where the call is bfloat16.
  absl::Status OutputOut(const RowShape& shape, void* to, int64_t offset, const Problem& p,
                         absl::Span<const Part> parts, absl::Span<const int> exponents);
  absl::Status ScoreInputs(const CallLayout& at, const uint8_t* mask_bits, const void* bias);
  absl::Status BytesIn(int64_t offset, const void* from, int64_t bytes);
  absl::Status FloatsOut(float* to, int64_t offset, int64_t count);

  KernelDevice& device_;
  const uint64_t arena_;
  std::vector<uint16_t> scratch_;
};

}  // namespace attnd::cuda
