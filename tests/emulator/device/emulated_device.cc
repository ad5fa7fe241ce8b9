#include "tests/emulator/device/emulated_device.h"

#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "tests/emulator/kernels/find_emulated_kernel.h"

namespace attnd::cuda {
namespace {

using emulator::Contents;

constexpr int64_t kArenaAlignment = 256;  // as a GPU's
constexpr int kStayingBlocks = 2;

std::vector<KernelRow> RowsOfDevice(const EmulatedDeviceOptions& options) {
  std::vector<KernelRow> rows = KernelRowsOfGpu(InfoOf(options.architecture).compute_capability);
  std::erase_if(rows, [&](const KernelRow& row) {
    return FindEmulatedKernel(row).run == nullptr || (options.lacks && options.lacks(row));
  });
  return rows;
}

// Set to a pattern that is NaN as float16 and as float32.
class EmulatedMemory final : public DeviceMemory {
 public:
  explicit EmulatedMemory(int64_t bytes)
      : bytes_(bytes), memory_(static_cast<size_t>(bytes + kArenaAlignment), std::byte{0xff}) {}
  uint64_t address() const override {
    auto address = reinterpret_cast<uint64_t>(memory_.data());
    return (address + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  }
  int64_t bytes() const override { return bytes_; }

 private:
  const int64_t bytes_;
  std::vector<std::byte> memory_;
};

// Adds the seconds for which it lives.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point start_ = Clock::now();
};

// Everything happens at the call. Finish finds what was downloaded as it was: on a GPU the copy may
// run until then.
class EmulatedLaunch final : public DeviceLaunch {
 public:
  EmulatedLaunch(const EmulatedDeviceOptions& options, int64_t bytes,
                 absl::Span<const Region> regions)
      : options_(options), memory_(bytes), base_(memory_.address()) {
    Register(base_, regions);
  }
  EmulatedLaunch(const EmulatedDeviceOptions& options, const DevicePart& arena,
                 absl::Span<const Region> regions)
      : options_(options), memory_(0), base_(arena.address()) {
    const DeviceMemory& around = *arena.memory;
    const int64_t end = arena.offset + arena.bytes;
    const Region rest[] = {{"memory", 0, arena.offset, RegionUse::kZeroed},
                           {"memory", end, around.bytes() - end, RegionUse::kZeroed}};
    Register(around.address(), rest);
    Register(base_, regions);
  }

  uint64_t arena() const override { return base_; }
  void Use(const DeviceMemory& memory, absl::Span<const Region> regions) override {
    if (used_.insert(memory.address()).second) Register(memory.address(), regions);
  }
  absl::Status Upload(const HostCopy& copy) override {
    const Stopwatch watch(times_.upload);
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(DeviceRow(copy, row), copy.host + row * copy.host_pitch, copy.bytes);
    }
    return absl::OkStatus();
  }
  absl::Status UploadCopy(uint64_t to, const void* from, int64_t bytes) override {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return absl::OkStatus();
  }
  absl::Status SetZero(uint64_t at, int64_t bytes) override {
    std::memset(reinterpret_cast<void*>(at), 0, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Run(absl::Span<const KernelStep> steps,
                           const std::function<bool()>& wanted) override {
    if (!wanted()) return false;
    for (const KernelStep& step : steps) RETURN_IF_ERROR(RunStep(step));
    return true;
  }
  absl::Status Download(const HostCopy& copy) override {
    const Stopwatch watch(times_.download);
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(copy.host + row * copy.host_pitch, DeviceRow(copy, row), copy.bytes);
    }
    downloads_.push_back(copy);
    return absl::OkStatus();
  }
  absl::StatusOr<DeviceTimes> Finish() override {
    for (const HostCopy& copy : downloads_) {
      for (int64_t row = 0; row < copy.rows; ++row) {
        const std::byte* host = copy.host + row * copy.host_pitch;
        if (std::memcmp(host, DeviceRow(copy, row), copy.bytes) == 0) continue;
        return absl::InternalError("a kernel wrote what was being downloaded");
      }
    }
    return times_;
  }

 private:
  static void* DeviceRow(const HostCopy& copy, int64_t row) {
    return reinterpret_cast<void*>(copy.device + static_cast<uint64_t>(row * copy.device_pitch));
  }
  void Register(uint64_t base, absl::Span<const Region> regions) {
    for (const Region& region : regions) {
      Contents contents = region.use == RegionUse::kInput    ? Contents::kConstant
                          : region.use == RegionUse::kZeroed ? Contents::kInitialised
                                                             : Contents::kUninitialised;
      global_.Register(reinterpret_cast<const void*>(base + region.offset), region.bytes, contents,
                       region.name);
    }
  }

  absl::Status RunStep(const KernelStep& step) {
    const EmulatedKernel kernel = FindEmulatedKernel(step.row);
    CHECK(kernel.run != nullptr) << NameOf(step.row);
    emulator::LaunchOptions launch;
    // Few enough that blocks that stay have several tiles, and enough that several take them.
    const int blocks =
        step.row.stays ? std::min(step.params.tile_count, kStayingBlocks) : step.params.tile_count;
    launch.grid.x = static_cast<uint32_t>(blocks);
    launch.threads = kernel.threads;
    launch.shared_bytes = kernel.shared_bytes;
    launch.memory = &global_;
    launch.shared = options_.shared;
    auto report = [&] {
      const Stopwatch watch(times_.kernel);
      return emulator::Launch(
          launch, [&](const emulator::Place& at) { kernel.run(step.params, at, blocks); });
    }();
    if (!report.ok()) {
      return absl::InternalError(absl::StrCat(NameOf(step.row), ": ", report.status().message()));
    }
    if (options_.observer) options_.observer(step.row, *report);
    return absl::OkStatus();
  }

  const EmulatedDeviceOptions& options_;
  EmulatedMemory memory_;
  const uint64_t base_;
  std::set<uint64_t> used_;  // memory outside the arena: several calls may read one residual
  emulator::GlobalMemory global_;
  DeviceTimes times_;
  std::vector<HostCopy> downloads_;
};

// Everything happens at the call here too.
class EmulatedStream final : public DeviceStream {
 public:
  absl::Status Enter() override { return absl::OkStatus(); }
  void* raw() const override { return nullptr; }
  absl::Status Mark() override { return absl::OkStatus(); }
  absl::StatusOr<bool> HasPassedMark() const override { return true; }
};

class EmulatedDevice final : public KernelDevice {
 public:
  explicit EmulatedDevice(const EmulatedDeviceOptions& options)
      : options_(options), rows_(RowsOfDevice(options)) {
    info_.backend = "cuda";
    info_.device = "emulator";
    info_.architecture = TargetOf(InfoOf(options.architecture).compute_capability);
    info_.memory_bytes = int64_t{1} << 30;
    info_.flops_per_second = 1e8;
  }

  const BackendInfo& info() const override { return info_; }
  int multiprocessors() const override { return options_.multiprocessors; }
  const std::vector<KernelRow>& rows() const override { return rows_; }
  absl::StatusOr<TensorMap> Encode(const RowsBox& box) const override {
    TensorMap map = {};
    static_assert(sizeof(box) <= sizeof(map));
    std::memcpy(&map, &box, sizeof(box));
    return map;
  }
  absl::Status Check(const KernelRow& row) const override {
    if (FindEmulatedKernel(row).run != nullptr) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("the emulator lacks ", NameOf(row)));
  }
  absl::StatusOr<std::unique_ptr<DeviceLaunch>> Begin(int64_t bytes,
                                                      absl::Span<const Region> regions) override {
    return std::make_unique<EmulatedLaunch>(options_, bytes, regions);
  }
  absl::StatusOr<std::unique_ptr<DeviceLaunch>> BeginIn(const DevicePart& arena,
                                                        absl::Span<const Region> regions) override {
    return std::make_unique<EmulatedLaunch>(options_, arena, regions);
  }
  std::unique_ptr<DeviceMemory> Hold(int64_t bytes) override {
    return std::make_unique<EmulatedMemory>(bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() override {
    return std::make_unique<EmulatedStream>();
  }
  double max_slice_seconds() const override { return options_.max_slice_seconds; }
  int64_t mask_bytes() const override { return options_.mask_bytes; }

 private:
  const EmulatedDeviceOptions options_;
  const std::vector<KernelRow> rows_;
  BackendInfo info_;
};

}  // namespace

std::unique_ptr<KernelDevice> MakeEmulatedDevice(const EmulatedDeviceOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

}  // namespace attnd::cuda
