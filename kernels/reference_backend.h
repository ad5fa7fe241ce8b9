// ReferenceBackend: attention/reference.h as an engine. It supports every problem, computes in
// float64 on one thread and rounds each result once to its element type. Workspace: none (float64
// copies of a call's tensors are taken from the heap: this engine is for checking, not for load).
#pragma once

#include "kernels/backend.h"

namespace attnd {

class ReferenceBackend : public Backend {
 public:
  ReferenceBackend();
  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem& problem, Direction direction) const override;
  absl::StatusOr<MaskKernel> KernelForMask(const Problem& problem,
                                           Direction direction) const override;
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override;
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override;
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override;
  absl::Status SupportsCapture() const override { return absl::OkStatus(); }
  absl::StatusOr<CapturedMap> Capture(const ForwardCall& call,
                                      const CaptureRequest& request) override;

 private:
  BackendInfo info_;
};

}  // namespace attnd
