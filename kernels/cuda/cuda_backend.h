// The cuda engine: calls → kernels of one device, several launches on their way at once.
//
//   calls → rows of the kernel table (selection.h) → arena, descriptors and tiles (layout/,
//   launch_plan.h) → uploads (transfer.h) → slices of the kernels → downloads
//
// Calls that need the same kernels share one launch; what shares a launch changes no bit of a
// result. A launch that would keep the device longer than a slice may (KernelDevice) is cut into
// several over ranges of its tiles: each tile's arithmetic is independent, and backward's tiles
// wait only for tiles that stand before them. Between slices other launches get their turn, and a
// launch whose calls have all stopped ends. Threads and errors: see backend.h. Admission keeps
// DeviceBytes of each call, so a launch finds its memory; until then it waits for that of launches
// that are ending.
//
// A capture is a launch of its own after its forward's: the call's Q, K and lse go up once more.
//
// A kept forward has its tensors in memory of their own, which stays when the launch goes; a
// backward on that residual reads them there. Lists of masks stay likewise (masks/). A bfloat16
// call's V and O lie on the device in other powers of two than backward wants (transfer.h), so a
// last kernel puts them there in backward's.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "attention/mask_plans.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/in_place_call.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/masks/mask_cache.h"
#include "kernels/cuda/residue_choice.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

class CudaBackend final : public Backend {
 public:
  // `plans`: compiled masks, shared with who else asks for them; null: its own. `mask_way`: for
  // tests, whatever is predicted.
  explicit CudaBackend(std::unique_ptr<KernelDevice> device,
                       std::shared_ptr<MaskPlans> plans = nullptr,
                       std::optional<MaskWay> mask_way = std::nullopt);

  const BackendInfo& info() const override { return device_->info(); }
  absl::Status Supports(const Problem& problem, Direction direction) const override;
  absl::StatusOr<MaskKernel> KernelForMask(const Problem& problem,
                                           Direction direction) const override;
  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override;
  int64_t DeviceBytes(const Problem& problem, Direction direction) const override;
  int64_t KeepingBytes(const Problem& problem) const override;
  int64_t ResidualBytes(const Problem& problem) const override;
  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    return device_->RegisterHost(memory);
  }
  void UnregisterHost(absl::Span<std::byte> memory) override { device_->UnregisterHost(memory); }
  DeviceUse Use() const override { return device_->use(); }
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override;
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override;
  // ---- Calls whose tensors lie in memory of this device, rows as the kernels read them: whole 16
  // bytes, padding zero, no bias. Masks' bits are the host's. `arena`: a place in that memory, of
  // at least the bytes told here where there is no mask; with one, or without room, a launch takes
  // memory of its own.
  KernelDevice& device() { return *device_; }
  // As Supports; UNIMPLEMENTED too for elements that kernels do not read as they are.
  absl::Status SupportsInPlace(const Problem& problem, Direction direction) const;
  int64_t ArenaBytesInPlace(const Problem& problem, Direction direction) const;
  // Each waits for its own launch.
  absl::Status RunInPlace(const ForwardCall& call, const DevicePart& arena);
  absl::Status RunInPlace(const BackwardCall& call, const DevicePart& arena);
  // Calls without a mask: for a launch of the caller's.
  static bool HasMask(const Problem& problem) {
    return problem.bool_mask.has_value() || problem.mask != nullptr;
  }
  absl::StatusOr<InPlaceCall> PlanInPlace(const ForwardCall& call, const DevicePart& arena) const;
  absl::StatusOr<InPlaceCall> PlanInPlace(const BackwardCall& call, const DevicePart& arena) const;

  absl::Status SupportsCapture() const override;
  int64_t CaptureBytes(const Problem& problem, const CaptureRequest& request) const override;
  absl::StatusOr<CapturedMap> Capture(const ForwardCall& call,
                                      const CaptureRequest& request) override;

 private:
  // For each call the place of its tensors, if outside the arena.
  using Held = std::vector<const DeviceMemory*>;

  // Chooses the kernels for a valid problem, and the classes by which it goes, if it does.
  absl::StatusOr<ForwardKernels> ForwardKernelsOf(const Problem& problem) const;
  absl::StatusOr<BackwardKernels> BackwardKernelsOf(const Problem& problem) const;
  std::optional<ResidueClasses> ClassesOf(const Problem& problem) const;
  absl::StatusOr<DeviceTimes> RunForward(const ForwardKernels& kernels,
                                         absl::Span<const ForwardCall* const> calls);
  absl::StatusOr<DeviceTimes> RunBackward(const BackwardKernels& kernels,
                                          absl::Span<const BackwardCall* const> calls);
  // One launch: calls of the same kernels.
  template <class Call>
  absl::StatusOr<DeviceTimes> Launch(LaunchPlan& plan, absl::Span<const Call* const> calls,
                                     const Held& held, absl::Span<const CallMask> masks);
  template <class Kernels, class Call>
  absl::Status LaunchInPlace(const Kernels& kernels, const Call& call, const DevicePart& arena);
  template <class Kernels, class Call>
  InPlaceCall PlanInPlace(const Kernels& kernels, const Call& call, const DevicePart& arena) const;
  // How its tensors reach this device's kernels.
  Travel TravelOf(const Problem& problem) const;
  // Prepares a problem's mask by description; lists are not yet in the device's memory.
  template <class Kernels>
  absl::StatusOr<CallMask> MaskFor(const Problem& problem, const Kernels& kernels) const;
  // Prepares the masks of all calls.
  template <class Call, class Kernels>
  absl::StatusOr<std::vector<CallMask>> MasksOf(absl::Span<const Call* const> calls,
                                                const Kernels& kernels);
  template <class Call>
  absl::StatusOr<bool> RunSlices(DeviceLaunch& launch, const LaunchPlan& plan,
                                 absl::Span<const Call* const> calls);
  // None takes longer than max_slice_seconds, as far as that is known.
  int SlicesOf(double flops, Direction direction) const;
  // So many blocks of a kernel run at once.
  int64_t Wave(const KernelRow& row) const;
  void Cut(LaunchPlan& plan) const;
  void Learn(const LaunchPlan& plan, double seconds);

  const std::unique_ptr<KernelDevice> device_;
  const std::shared_ptr<MaskPlans> plans_;
  const std::optional<MaskWay> mask_way_;
  MaskCache masks_;
  std::array<std::atomic<double>, 2> seconds_per_flop_;  // by direction; follows launches
};

}  // namespace attnd::cuda
