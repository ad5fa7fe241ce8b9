#include "kernels/registry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/engine/cuda_backend.h"
#include "kernels/engine/device/driver_device.h"
#include "kernels/reference_backend.h"
#include "kernels/tiles.h"

namespace attnd {
namespace {

using Backends = std::vector<std::unique_ptr<Backend>>;

absl::StatusOr<Backends> MakeCuda(const BackendOptions& options) {
  std::vector<int> ordinals = options.devices;
  if (ordinals.empty()) {
    ASSIGN_OR_RETURN(const int count, cuda::CountDevices());
    for (int n = 0; n < count; ++n) ordinals.push_back(n);
  }
  Backends backends;
  for (int ordinal : ordinals) {
    ASSIGN_OR_RETURN(auto device,
                     cuda::MakeDriverDevice({.ordinal = ordinal,
                                             .kernel_cache = options.kernel_cache,
                                             .memory_fraction = options.memory_fraction,
                                             .max_slice_seconds = options.max_slice_seconds}));
    backends.push_back(std::make_unique<cuda::CudaBackend>(std::move(device), options.mask_plans));
  }
  return backends;
}

Backends One(std::unique_ptr<Backend> backend) {
  Backends backends;
  backends.push_back(std::move(backend));
  return backends;
}

std::unique_ptr<Backend> MakeCpu(const BackendOptions& options) {
  return MakeCpuBackend({.threads = options.cpu_threads, .mask_plans = options.mask_plans});
}

// Whether kernels are made for these GPUs. Those for others run there exactly but slowly, so the
// cuda engine has to be asked for.
bool HasOwnKernels(absl::string_view target) {
  return std::any_of(Architectures().begin(), Architectures().end(),
                     [&](const ArchitectureInfo& info) { return info.target == target; });
}

std::string WhyNotCuda(const absl::StatusOr<Backends>& cuda) {
  if (!cuda.ok()) return std::string(cuda.status().message());
  for (const auto& backend : *cuda) {
    const BackendInfo& info = backend->info();
    if (HasOwnKernels(info.architecture)) continue;
    return absl::StrCat(info.device, " is ", info.architecture,
                        ", where kernels for other GPUs are slow; --backend cuda takes it all the "
                        "same");
  }
  return "";
}

}  // namespace

absl::StatusOr<Backends> MakeBackends(absl::string_view name, const BackendOptions& options,
                                      std::string* note) {
  if (note != nullptr) note->clear();
  if (name == "reference") return One(std::make_unique<ReferenceBackend>());
  if (name == "cpu") return One(MakeCpu(options));
  if (name == "cuda") return MakeCuda(options);
  if (name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend: expected auto, cpu, cuda or reference, got ", name));
  }
  absl::StatusOr<Backends> cuda = MakeCuda(options);
  const std::string why_not = WhyNotCuda(cuda);
  if (why_not.empty()) return cuda;
  if (note != nullptr) *note = absl::StrCat("cpu engine: ", why_not);
  return One(MakeCpu(options));
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view name,
                                                     const BackendOptions& options,
                                                     std::string* note) {
  BackendOptions one = options;
  if (one.devices.empty()) one.devices = {0};
  ASSIGN_OR_RETURN(Backends backends, MakeBackends(name, one, note));
  return std::move(backends.front());
}

}  // namespace attnd
