#include "kernels/registry/registry.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/reference_backend.h"

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
  if (cuda.ok()) return cuda;
  if (note != nullptr) *note = absl::StrCat("cpu engine: ", cuda.status().message());
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
