#include "kernels/cuda/emulated_device.h"

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/sm70/emulated_kernels.h"

namespace attnd::cuda {
namespace {

using emulator::Contents;

class EmulatedDevice final : public KernelDevice {
 public:
  explicit EmulatedDevice(const EmulatedDeviceOptions& options) : options_(options) {
    info_.backend = "cuda";
    info_.device = "emulator";
    info_.architecture = "sm_70";
    info_.memory_bytes = int64_t{1} << 30;
    info_.flops_per_second = 1e8;
  }

  const BackendInfo& info() const override { return info_; }
  absl::Status Check(const KernelRow& row) const override {
    if (sm70::FindEmulatedKernel(row).run != nullptr) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("the emulator lacks ", NameOf(row)));
  }

  absl::StatusOr<uint64_t> Reserve(int64_t bytes, absl::Span<const Region> regions) override {
    // Fresh bytes each time, set to a pattern that is NaN as float16 and as float32.
    memory_ = std::make_unique<std::byte[]>(bytes + kRegionAlignment);
    std::memset(memory_.get(), 0xff, bytes + kRegionAlignment);
    auto address = reinterpret_cast<uint64_t>(memory_.get());
    base_ = (address + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
    global_.Clear();
    for (const Region& region : regions) {
      Contents contents = region.use == RegionUse::kInput    ? Contents::kConstant
                          : region.use == RegionUse::kZeroed ? Contents::kInitialised
                                                             : Contents::kUninitialised;
      global_.Register(reinterpret_cast<const void*>(base_ + region.offset), region.bytes, contents,
                       region.name);
    }
    seconds_ = 0;
    return base_;
  }
  absl::Status CopyIn(uint64_t to, const void* from, int64_t bytes) override {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return absl::OkStatus();
  }
  absl::Status CopyOut(void* to, uint64_t from, int64_t bytes) override {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return absl::OkStatus();
  }
  absl::Status SetZero(uint64_t at, int64_t bytes) override {
    std::memset(reinterpret_cast<void*>(at), 0, bytes);
    return absl::OkStatus();
  }

  absl::Status Run(const KernelRow& row, const LaunchParams& params) override {
    sm70::EmulatedKernel kernel = sm70::FindEmulatedKernel(row);
    CHECK(kernel.run != nullptr) << NameOf(row);
    emulator::LaunchOptions launch;
    launch.grid.x = static_cast<uint32_t>(params.tile_count);
    launch.threads = kernel.threads;
    launch.shared_bytes = kernel.shared_bytes;
    launch.memory = &global_;
    launch.shared = options_.shared;
    auto start = std::chrono::steady_clock::now();
    auto report =
        emulator::Launch(launch, [&](const emulator::Place& at) { kernel.run(params, at); });
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!report.ok()) {
      return absl::InternalError(absl::StrCat(NameOf(row), ": ", report.status().message()));
    }
    if (options_.observer) options_.observer(row, *report);
    return absl::OkStatus();
  }
  absl::StatusOr<double> Finish() override { return seconds_; }

 private:
  const EmulatedDeviceOptions options_;
  BackendInfo info_;
  std::unique_ptr<std::byte[]> memory_;
  uint64_t base_ = 0;
  emulator::GlobalMemory global_;
  double seconds_ = 0;
};

}  // namespace

std::unique_ptr<KernelDevice> MakeEmulatedDevice(const EmulatedDeviceOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

}  // namespace attnd::cuda
