#include "kernels/cuda/driver_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/driver/handles.h"
#include "kernels/library/embedded_kernels.h"
#include "kernels/library/kernel_library.h"

namespace attnd::cuda {
namespace {

// The kernels are built on mma.m8n8k4, which came with this compute capability.
constexpr int kMinimumMajor = 7;
// Inputs and outputs may take this share of the memory that is free at the start: the rest is for
// gradients' float32 sums and padding, which are at most as large again.
constexpr double kTensorShare = 0.5;

class DriverDevice final : public KernelDevice {
 public:
  static absl::StatusOr<std::unique_ptr<KernelDevice>> Make(const DriverDeviceOptions& options) {
    auto device = std::unique_ptr<DriverDevice>(new DriverDevice());
    RETURN_IF_ERROR(device->Start(options));
    return device;
  }
  ~DriverDevice() override {
    // Members free device memory: their context must be this thread's.
    if (context_) context_.MakeCurrent().IgnoreError();
  }

  const BackendInfo& info() const override { return info_; }
  absl::Status Check(const KernelRow& row) const override { return library_->Check(row); }

  absl::StatusOr<uint64_t> Reserve(int64_t bytes, absl::Span<const Region>) override {
    RETURN_IF_ERROR(context_.MakeCurrent());
    runs_ = 0;
    if (bytes <= arena_.bytes()) return arena_.address().value;
    arena_ = DeviceMemory();  // free first: both together may not fit
    absl::StatusOr<DeviceMemory> grown = DeviceMemory::Allocate(*driver_, bytes);
    if (!grown.ok() && ResultOf(grown.status()) == CUDA_ERROR_OUT_OF_MEMORY) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the GPU cannot hold a launch of ", bytes, " bytes"));
    }
    ASSIGN_OR_RETURN(arena_, std::move(grown));
    return arena_.address().value;
  }
  absl::Status CopyIn(uint64_t to, const void* from, int64_t bytes) override {
    RETURN_IF_ERROR(stream_.ref().CopyIn({to}, from, bytes));
    // The source may be the caller's scratch.
    return stream_.ref().Synchronize();
  }
  absl::Status CopyOut(void* to, uint64_t from, int64_t bytes) override {
    RETURN_IF_ERROR(stream_.ref().CopyOut(to, {from}, bytes));
    return stream_.ref().Synchronize();
  }
  absl::Status SetZero(uint64_t at, int64_t bytes) override {
    return stream_.ref().SetZero({at}, bytes);
  }

  absl::Status Run(const KernelRow& row, const LaunchParams& params) override {
    ASSIGN_OR_RETURN(LoadedKernel kernel, library_->Get(row));
    if (runs_++ == 0) RETURN_IF_ERROR(stream_.ref().Record(start_));
    LaunchParams copy = params;
    void* arguments[] = {&copy};
    RETURN_IF_ERROR(
        stream_.ref().Launch(kernel.function,
                             {.blocks = static_cast<uint32_t>(params.tile_count),
                              .threads = static_cast<uint32_t>(kernel.threads),
                              .shared_bytes = static_cast<uint32_t>(kernel.shared_bytes)},
                             arguments));
    return stream_.ref().Record(stop_);
  }
  absl::StatusOr<double> Finish() override {
    RETURN_IF_ERROR(stream_.ref().Synchronize());
    if (runs_ == 0) return 0.0;
    return stop_.SecondsSince(start_);
  }

 private:
  DriverDevice() = default;

  absl::Status Start(const DriverDeviceOptions& options) {
    ASSIGN_OR_RETURN(driver_, Driver::Load(options.driver_library));
    ASSIGN_OR_RETURN(const int count, driver_->DeviceCount());
    if (options.ordinal < 0 || options.ordinal >= count) {
      return absl::FailedPreconditionError(
          absl::StrCat("device ", options.ordinal, ": the driver sees ", count, " GPUs"));
    }
    ASSIGN_OR_RETURN(const DeviceIdentity identity, driver_->Identify(options.ordinal));
    if (identity.major < kMinimumMajor) {
      return absl::FailedPreconditionError(
          absl::StrCat(identity.name, " has compute capability ", identity.major, ".",
                       identity.minor, "; the cuda engine needs at least ", kMinimumMajor, ".0"));
    }
    ASSIGN_OR_RETURN(context_, Context::Retain(*driver_, options.ordinal));
    ASSIGN_OR_RETURN(stream_, Stream::Create(*driver_));
    ASSIGN_OR_RETURN(start_, Event::Create(*driver_, /*timed=*/true));
    ASSIGN_OR_RETURN(stop_, Event::Create(*driver_, /*timed=*/true));
    ASSIGN_OR_RETURN(library_, KernelLibrary::Create(*driver_, identity.major, identity.minor,
                                                     EmbeddedKernelArchives(),
                                                     {.cache_directory = options.kernel_cache}));
    return Describe(identity);
  }

  absl::Status Describe(const DeviceIdentity& identity) {
    ASSIGN_OR_RETURN(const auto memory, context_.MemoryInfo());
    info_.backend = "cuda";
    info_.device = identity.name;
    info_.architecture = absl::StrCat("sm_", identity.major, identity.minor);
    info_.uuid = identity.uuid;
    info_.memory_bytes = static_cast<int64_t>(static_cast<double>(memory.first) * kTensorShare);
    // Volta: 1024 operations a clock on each multiprocessor's tensor cores, half of them reached.
    // Newer GPUs emulate the instruction: a fiftieth of that.
    const double peak = 1024.0 * identity.multiprocessors * 1e3 * identity.clock_khz;
    info_.flops_per_second = identity.major == kMinimumMajor ? 0.5 * peak : 0.02 * peak;
    return absl::OkStatus();
  }

  // In the order in which they are needed: destroyed last to first.
  std::unique_ptr<Driver> driver_;
  Context context_;
  BackendInfo info_;
  Stream stream_;
  Event start_, stop_;
  DeviceMemory arena_;
  std::unique_ptr<KernelLibrary> library_;
  int runs_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelDevice>> MakeDriverDevice(const DriverDeviceOptions& options) {
  return DriverDevice::Make(options);
}

}  // namespace attnd::cuda
