// The cuda engine: one device, one launch at a time, synchronous copies from and to host memory.
//
//   calls → rows of the kernel table (selection.h) → arena and descriptors (plan.h) → copies in
//   (transfer.h) → kernels → copies out
//
// Calls that need the same kernels share one launch; what shares a launch changes no bit of a
// result. Calls' pointers are host pointers; WorkspaceBytes is 0, because what the kernels need
// besides tensors is the engine's own device memory.
// Threads and errors: see backend.h. A launch that does not fit the device fails with
// RESOURCE_EXHAUSTED; info().memory_bytes leaves room for the workspace, so admission prevents it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/kernel_device.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<KernelDevice> device);

  const BackendInfo& info() const override { return device_->info(); }
  absl::Status Supports(const Problem& problem, Direction direction) const override;
  int64_t WorkspaceBytes(const Problem&, Direction) const override { return 0; }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override;
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override;

 private:
  // One launch: calls of the same kernels.
  absl::StatusOr<double> RunForward(const ForwardKernels& kernels,
                                    absl::Span<const ForwardCall* const> calls);
  absl::StatusOr<double> RunBackward(const BackwardKernels& kernels,
                                     absl::Span<const BackwardCall* const> calls);

  std::unique_ptr<KernelDevice> device_;
};

}  // namespace attnd::cuda
