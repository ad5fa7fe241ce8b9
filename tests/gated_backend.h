// GatedBackend: a test double of an engine: the reference engine behind a gate that a test opens
// and closes, so that a call can be held inside its kernel; it can also fail, refuse, ask for
// workspace, and have a memory of its own in which it keeps residuals. Any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/backend.h"
#include "kernels/reference_backend.h"

namespace attnd {

class GatedBackend final : public Backend {
 public:
  GatedBackend() : info_(reference_.info()) {
    info_.backend = "gated";
    info_.flops_per_second = 1e9;
    info_.threads = 0;  // as a GPU
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
  // From now on a kept forward leaves its tensors "there", so many bytes of the above; a backward
  // on them sees no others.
  void KeepResiduals(int64_t bytes) {
    Set([&] { residual_bytes_ = bytes; });
  }
  void SetPciBusId(const std::string& id) { info_.pci_bus_id = id; }
  int64_t held_bytes() const { return held_bytes_; }
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
  int64_t ResidualBytes(const Problem&) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return residual_bytes_;
  }
  absl::Status RegisterHost(absl::Span<std::byte>) override {
    ++host_registrations_;
    return absl::OkStatus();
  }
  void UnregisterHost(absl::Span<std::byte>) override { --host_registrations_; }
  int host_registrations() const { return host_registrations_; }  // that stand
  DeviceUse Use() const override {
    DeviceUse use;
    std::lock_guard<std::mutex> lock(mutex_);
    if (device_bytes_ > 0) use.memory_total_bytes = info_.memory_bytes;
    use.lease_bytes = held_bytes_;
    return use;
  }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    absl::Status status = Pass(calls);
    if (!status.ok()) return status;
    absl::StatusOr<LaunchReport> report = reference_.Forward(calls);
    for (const ForwardCall& call : calls) {
      if (call.kept != nullptr && ResidualBytes(*call.problem) > 0) {
        *call.kept = std::make_unique<Residual>(*this, call);
      }
    }
    return report;
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    absl::Status status = Pass(calls);
    if (!status.ok()) return status;
    std::vector<BackwardCall> with_tensors(calls.begin(), calls.end());
    for (BackwardCall& call : with_tensors) {
      if (call.residual != nullptr) {
        static_cast<const Residual*>(call.residual)->GiveTensors(*this, call);
      }
    }
    return reference_.Backward(with_tensors);
  }

 private:
  class Residual final : public DeviceResidual {
   public:
    Residual(GatedBackend& owner, const ForwardCall& call)
        : owner_(owner),
          bytes_(owner.ResidualBytes(*call.problem)),
          element_(ElementBytes(call.problem->element)),
          q_(Copy(call.q, call.problem->QueryElements() * element_)),
          k_(Copy(call.k, call.problem->KeyElements() * element_)),
          v_(Copy(call.v, call.problem->ValueElements() * element_)),
          o_(Copy(call.o, call.problem->OutputElements() * element_)),
          lse_(Copy(call.lse, call.problem->LseElements() * 4)) {
      CHECK(!call.problem->bool_mask && !call.problem->bias) << "not of this double";
      owner_.held_bytes_ += bytes_;
    }
    ~Residual() override { owner_.held_bytes_ -= bytes_; }
    int64_t bytes() const override { return bytes_; }
    void GiveTensors(const GatedBackend& user, BackwardCall& call) const {
      CHECK(&user == &owner_) << "a residual of another device";
      CHECK(call.q == nullptr && call.o == nullptr && call.lse == nullptr);
      call.q = q_.data();
      call.k = k_.data();
      call.v = v_.data();
      call.o = o_.data();
      call.lse = lse_.as<float>();
    }

   private:
    static AlignedBytes Copy(const void* from, int64_t bytes) {
      AlignedBytes copy(bytes);
      std::memcpy(copy.data(), from, static_cast<size_t>(bytes));
      return copy;
    }
    GatedBackend& owner_;
    const int64_t bytes_, element_;
    const AlignedBytes q_, k_, v_, o_, lse_;
  };

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
  int64_t workspace_bytes_ = 0, device_bytes_ = 0, residual_bytes_ = 0;
  std::atomic<int64_t> held_bytes_{0};  // of residuals; not under the mutex, as the next
  std::atomic<int> host_registrations_{0};
};

}  // namespace attnd
