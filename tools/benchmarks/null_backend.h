// NullBackend: an engine that computes nothing and leaves the outputs as they lie, so that a
// benchmark sees the wire alone. Another engine passes the daemon's self test for it; from
// StopComputing on every launch returns at once, or takes a device of the given rate for as long as
// its flops need there: one launch after the other, while more wait. Benchmarks only: an answer
// holds whatever staging memory held before.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "attention/cost.h"
#include "kernels/backend.h"

namespace attnd {

class NullBackend final : public Backend {
 public:
  explicit NullBackend(std::unique_ptr<Backend> engine)
      : engine_(std::move(engine)), info_(engine_->info()) {
    info_.backend = "null";
    info_.flops_per_second = 1e15;
  }

  // 0: infinitely fast.
  void StopComputing(double flops_per_second = 0) {
    if (flops_per_second > 0) seconds_per_flop_ = 1 / flops_per_second;
    computes_ = false;
  }

  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem&, Direction) const override { return absl::OkStatus(); }
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override {
    return computes_ ? engine_->WorkspaceBytes(problem, direction) : 0;
  }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    return computes_ ? engine_->Forward(calls) : Nothing(calls, Direction::kForward);
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    return computes_ ? engine_->Backward(calls) : Nothing(calls, Direction::kBackward);
  }

 private:
  template <class Call>
  LaunchReport Nothing(absl::Span<const Call> calls, Direction direction) {
    if (seconds_per_flop_ == 0) return {.kernel = "null", .seconds = 1e-9};
    std::lock_guard<std::mutex> lock(device_);
    double flops = 0;
    for (const Call& call : calls) {
      if (!call.stop.stop_requested()) flops += Flops(*call.problem, direction);
    }
    const double seconds = flops * seconds_per_flop_;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return {.kernel = "null", .seconds = seconds};
  }

  const std::unique_ptr<Backend> engine_;
  BackendInfo info_;
  double seconds_per_flop_ = 0;
  std::mutex device_;
  std::atomic<bool> computes_{true};
};

}  // namespace attnd
