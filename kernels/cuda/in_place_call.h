// InPlaceCall: one call whose tensors lie in memory of the device, as kernels of a launch that is
// its caller's, among other kernels: what to zero first, constants for a place of the caller's,
// then slices of kernels. A mask's bits and lists are not part of it: calls that have some are
// launched by CudaBackend. One call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/launch_plan.h"

namespace attnd::cuda {

// A range of the device's memory.
struct DeviceRange {
  uint64_t address = 0;
  int64_t bytes = 0;
};

TensorAddresses AddressesOf(const ForwardCall& call);
TensorAddresses AddressesOf(const BackwardCall& call);

// Lists the ranges that kernels of this plan expect to be zero in an arena at this address, beside
// those among constants: neighbours are one.
std::vector<DeviceRange> ZeroedRanges(const LaunchPlan& plan, uint64_t arena);
// The same of what lies outside the arena.
std::vector<DeviceRange> ZeroedGradients(const ForwardCall& call);
std::vector<DeviceRange> ZeroedGradients(const BackwardCall& call);

class InPlaceCall {
 public:
  // `plan` is of one call, its tensors placed for an arena at this address. `zeroed` beside the
  // plan's own.
  InPlaceCall(LaunchPlan plan, uint64_t arena, std::vector<DeviceRange> zeroed, double seconds);

  // Bytes of the arena, constants left out.
  int64_t arena_bytes() const { return plan_.constants_begin; }
  int64_t constant_bytes() const { return plan_.arena.bytes() - plan_.constants_begin; }
  // Before its kernels.
  const std::vector<DeviceRange>& zeroed() const { return zeroed_; }
  // Once: what the kernels read at `address`, behind the arena.
  absl::StatusOr<std::vector<std::byte>> ConstantsAt(uint64_t address, const KernelDevice& device);
  // After that: each takes about slice_seconds().
  int slices() const { return plan_.slices(); }
  std::vector<KernelStep> Slice(int slice) const { return plan_.Slice(arena_, slice); }
  double slice_seconds() const { return seconds_ / slices(); }

 private:
  LaunchPlan plan_;
  const uint64_t arena_;
  std::vector<DeviceRange> zeroed_;
  const double seconds_;
};

}  // namespace attnd::cuda
