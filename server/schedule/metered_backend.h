// MeteredBackend: an engine whose launches are counted. A decorator, so that metrics never touch
// logic. Threads as of Backend.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/cost.h"
#include "kernels/backend.h"
#include "server/metrics/metrics.h"

namespace attnd {

class MeteredBackend final : public Backend {
 public:
  // `backend` and `metrics` outlive this; `device` is Metrics::AddDevice's.
  MeteredBackend(Backend& backend, int device, Metrics& metrics)
      : backend_(backend), device_(device), metrics_(metrics) {}

  const BackendInfo& info() const override { return backend_.info(); }
  absl::Status Supports(const Problem& problem, Direction direction) const override {
    return backend_.Supports(problem, direction);
  }
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override {
    return backend_.WorkspaceBytes(problem, direction);
  }
  int64_t DeviceBytes(const Problem& problem, Direction direction) const override {
    return backend_.DeviceBytes(problem, direction);
  }
  int64_t KeepingBytes(const Problem& problem) const override {
    return backend_.KeepingBytes(problem);
  }
  int64_t ResidualBytes(const Problem& problem) const override {
    return backend_.ResidualBytes(problem);
  }
  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    return backend_.RegisterHost(memory);
  }
  void UnregisterHost(absl::Span<std::byte> memory) override { backend_.UnregisterHost(memory); }
  DeviceUse Use() const override { return backend_.Use(); }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    return Count(Direction::kForward, calls, backend_.Forward(calls));
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    return Count(Direction::kBackward, calls, backend_.Backward(calls));
  }
  absl::Status SupportsCapture() const override { return backend_.SupportsCapture(); }
  int64_t CaptureBytes(const Problem& problem, const CaptureRequest& request) const override {
    return backend_.CaptureBytes(problem, request);
  }
  absl::StatusOr<CapturedMap> Capture(const ForwardCall& call,
                                      const CaptureRequest& request) override {
    return backend_.Capture(call, request);
  }

 private:
  template <class Call>
  absl::StatusOr<LaunchReport> Count(Direction direction, absl::Span<const Call> calls,
                                     absl::StatusOr<LaunchReport> report) {
    if (!report.ok()) {
      metrics_.KernelFailed(device_, direction, report.status());
      return report;
    }
    double flops = 0;
    int64_t head_dim = 0;
    for (const Call& call : calls) {
      flops += Flops(*call.problem, direction);
      head_dim = std::max({head_dim, call.problem->qk_head_dim, call.problem->v_head_dim});
    }
    if (report->kernel.empty()) return report;  // nobody waited for it
    metrics_.KernelRan({device_, direction, calls.front().problem->element, report->kernel,
                        Metrics::HeadDimLabel(head_dim)},
                       report->seconds, flops);
    return report;
  }

  Backend& backend_;
  const int device_;
  Metrics& metrics_;
};

}  // namespace attnd
