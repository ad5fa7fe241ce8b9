// NullBackend: an engine that computes nothing and leaves the outputs as they lie, so that a
// benchmark sees the wire alone. Another engine passes the daemon's self test for it; from
// StopComputing on every launch returns at once. Benchmarks only: an answer holds whatever staging
// memory held before.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "kernels/backend.h"

namespace attnd {

class NullBackend final : public Backend {
 public:
  explicit NullBackend(std::unique_ptr<Backend> engine)
      : engine_(std::move(engine)), info_(engine_->info()) {
    info_.backend = "null";
    info_.flops_per_second = 1e15;
  }

  void StopComputing() { computes_ = false; }

  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem&, Direction) const override { return absl::OkStatus(); }
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override {
    return computes_ ? engine_->WorkspaceBytes(problem, direction) : 0;
  }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    return computes_ ? engine_->Forward(calls) : Nothing();
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    return computes_ ? engine_->Backward(calls) : Nothing();
  }

 private:
  static LaunchReport Nothing() { return {.kernel = "null", .seconds = 1e-9}; }

  const std::unique_ptr<Backend> engine_;
  BackendInfo info_;
  std::atomic<bool> computes_{true};
};

}  // namespace attnd
