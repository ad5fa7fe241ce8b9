#include "kernels/registry.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/driver_device.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(const BackendOptions& options) {
  ASSIGN_OR_RETURN(auto device, cuda::MakeDriverDevice({.ordinal = options.device,
                                                        .kernel_cache = options.kernel_cache}));
  return std::make_unique<cuda::CudaBackend>(std::move(device));
}

std::unique_ptr<Backend> MakeCpu(const BackendOptions& options) {
  return MakeCpuBackend({.threads = options.cpu_threads});
}

// The GPUs that the kernels are made for. Elsewhere Volta's instructions run exactly but slowly, so
// the cuda engine there has to be asked for.
constexpr absl::string_view kAutomaticArchitecture = "sm_70";

std::string WhyNotCuda(const absl::StatusOr<std::unique_ptr<Backend>>& cuda) {
  if (!cuda.ok()) return std::string(cuda.status().message());
  const BackendInfo& info = (*cuda)->info();
  return absl::StrCat(info.device, " is ", info.architecture, ", where kernels for ",
                      kAutomaticArchitecture, " are slow; --backend cuda takes it all the same");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view name,
                                                     const BackendOptions& options,
                                                     std::string* note) {
  if (note != nullptr) note->clear();
  if (name == "reference") return std::make_unique<ReferenceBackend>();
  if (name == "cpu") return MakeCpu(options);
  if (name == "cuda") return MakeCuda(options);
  if (name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend: expected auto, cpu, cuda or reference, got ", name));
  }
  absl::StatusOr<std::unique_ptr<Backend>> cuda = MakeCuda(options);
  if (cuda.ok() && (*cuda)->info().architecture == kAutomaticArchitecture) return cuda;
  if (note != nullptr) *note = absl::StrCat("cpu engine: ", WhyNotCuda(cuda));
  return MakeCpu(options);
}

}  // namespace attnd
