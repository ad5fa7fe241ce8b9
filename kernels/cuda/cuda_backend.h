// The cuda engine: calls → kernels of one device, several launches on their way at once.
//
//   calls → rows of the kernel table (selection.h) → arena, descriptors and tiles (plan.h,
//   launch_plan.h) → uploads (transfer.h) → slices of the kernels → downloads
//
// Calls that need the same kernels share one launch; what shares a launch changes no bit of a
// result. A launch that would keep the device longer than a slice may (KernelDevice) is cut into
// several over ranges of its tiles: each tile's arithmetic is independent, and backward's tiles
// wait only for tiles that stand before them. Between slices other launches get their turn, and a
// launch whose calls have all stopped ends. Threads and errors: see backend.h. Admission keeps
// DeviceBytes of each call, so a launch finds its memory; until then it waits for that of launches
// that are ending.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/backend.h"
#include "kernels/cuda/kernel_device.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<KernelDevice> device);

  const BackendInfo& info() const override { return device_->info(); }
  absl::Status Supports(const Problem& problem, Direction direction) const override;
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override;
  int64_t DeviceBytes(const Problem& problem, Direction direction) const override;
  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    return device_->RegisterHost(memory);
  }
  void UnregisterHost(absl::Span<std::byte> memory) override { device_->UnregisterHost(memory); }
  DeviceUse Use() const override { return device_->use(); }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override;
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override;

 private:
  // One launch: calls of the same kernels.
  template <class Call>
  absl::StatusOr<DeviceTimes> Launch(LaunchPlan plan, absl::Span<const Call* const> calls,
                                     Direction direction);
  template <class Call>
  absl::StatusOr<bool> RunSlices(DeviceLaunch& launch, const LaunchPlan& plan,
                                 absl::Span<const Call* const> calls, int slices);
  int SlicesOf(const LaunchPlan& plan, Direction direction) const;
  void Learn(const LaunchPlan& plan, Direction direction, double seconds);

  const std::unique_ptr<KernelDevice> device_;
  std::array<std::atomic<double>, 2> seconds_per_flop_;  // by direction; follows launches
};

}  // namespace attnd::cuda
