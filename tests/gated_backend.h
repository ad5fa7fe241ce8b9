// GatedBackend: a test double of an engine: the reference engine behind a gate that a test opens
// and closes, so that a call can be held inside its kernel; it can also fail, refuse and ask for
// workspace. Any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/reference_backend.h"

namespace attnd {

class GatedBackend final : public Backend {
 public:
  GatedBackend() : info_(reference_.info()) {
    info_.backend = "gated";
    info_.flops_per_second = 1e9;
  }

  // While closed, a launch stays inside until Open or until each of its calls is told to stop.
  void Close() {
    Set([this] { open_ = false; });
  }
  void Open() {
    Set([this] { open_ = true; });
  }
  // Waits until `count` launches in all have come to the gate.
  void WaitForLaunches(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return static_cast<int>(launches_.size()) >= count; });
  }
  // The query length of each call of each launch, in order.
  std::vector<std::vector<int64_t>> launches() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return launches_;
  }
  void FailWith(absl::Status status) {
    Set([&] { failure_ = std::move(status); });
  }
  void RefuseWith(absl::Status status) {
    Set([&] { refusal_ = std::move(status); });
  }
  // What a call takes of the device's memory, and how much it has.
  void SetDeviceBytes(int64_t bytes, int64_t memory_bytes) {
    Set([&] { device_bytes_ = bytes; });
    info_.memory_bytes = memory_bytes;
  }
  void SetWorkspace(int64_t bytes) {
    Set([&] { workspace_bytes_ = bytes; });
  }

  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem&, Direction) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return refusal_;
  }
  int64_t WorkspaceBytes(const Problem&, Direction) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return workspace_bytes_;
  }
  int64_t DeviceBytes(const Problem&, Direction) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return device_bytes_;
  }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    absl::Status status = Pass(calls);
    return status.ok() ? reference_.Forward(calls) : absl::StatusOr<LaunchReport>(status);
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    absl::Status status = Pass(calls);
    return status.ok() ? reference_.Backward(calls) : absl::StatusOr<LaunchReport>(status);
  }

 private:
  void Set(const std::function<void()>& change) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      change();
    }
    changed_.notify_all();
  }

  template <class Call>
  absl::Status Pass(absl::Span<const Call> calls) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<int64_t>& lengths = launches_.emplace_back();
    for (const Call& call : calls) lengths.push_back(call.problem->q_len);
    changed_.notify_all();
    // Each call's stop wakes the wait; the launch goes on when all have stopped.
    for (const Call& call : calls) changed_.wait(lock, call.stop, [this] { return open_; });
    return failure_;
  }

  ReferenceBackend reference_;
  BackendInfo info_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable_any changed_;
  bool open_ = true;
  std::vector<std::vector<int64_t>> launches_;
  absl::Status failure_, refusal_;
  int64_t workspace_bytes_ = 0, device_bytes_ = 0;
};

}  // namespace attnd
