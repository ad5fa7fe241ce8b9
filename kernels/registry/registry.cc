#include "kernels/registry/registry.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/cuda/driver/nccl.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "kernels/reference_backend.h"
#include "modules/reference/reference_engine.h"

namespace attnd {
namespace {

// Null where there is none, which the note says.
std::shared_ptr<const Nccl> LoadNccl(const std::string& library, std::string* note) {
  if (library.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<Nccl>> nccl = Nccl::Load(library);
  if (nccl.ok()) return *std::move(nccl);
  if (note != nullptr) {
    *note =
        absl::StrCat("gradients of replicas pass through their workers: ", nccl.status().message());
  }
  return nullptr;
}

absl::StatusOr<std::vector<Device>> MakeCuda(const BackendOptions& options, std::string* note) {
  std::vector<int> ordinals = options.devices;
  if (ordinals.empty()) {
    ASSIGN_OR_RETURN(const int count, cuda::CountDevices());
    for (int n = 0; n < count; ++n) ordinals.push_back(n);
  }
  std::vector<Device> devices;
  std::shared_ptr<const Nccl> nccl;
  std::shared_ptr<PlanCache> plans;
  if (options.fusion == Fusion::kMeasured)
    plans = std::make_shared<PlanCache>(options.kernel_cache);
  for (int ordinal : ordinals) {
    ASSIGN_OR_RETURN(auto device,
                     cuda::MakeDriverDevice({.ordinal = ordinal,
                                             .kernel_cache = options.kernel_cache,
                                             .memory_fraction = options.memory_fraction,
                                             .max_slice_seconds = options.max_slice_seconds}));
    if (devices.empty()) nccl = LoadNccl(options.nccl_library, note);
    devices.push_back(
        GpuDeviceOf(std::make_unique<cuda::CudaBackend>(std::move(device), options.mask_plans),
                    options.fusion, nccl, plans));
  }
  return devices;
}

std::vector<Device> One(Device device) {
  std::vector<Device> devices;
  devices.push_back(std::move(device));
  return devices;
}

std::vector<Device> MakeCpu(const BackendOptions& options) {
  return One(CpuDeviceOf({.threads = options.cpu_threads, .mask_plans = options.mask_plans}));
}

std::vector<Device> MakeReference() {
  return One({std::make_unique<ReferenceBackend>(),
              [](const HoldDeviceMemory&) { return std::make_unique<ReferenceEngine>(); }});
}

}  // namespace

absl::StatusOr<std::vector<Device>> MakeDevices(absl::string_view name,
                                                const BackendOptions& options, std::string* note) {
  if (note != nullptr) note->clear();
  if (name == "reference") return MakeReference();
  if (name == "cpu") return MakeCpu(options);
  if (name == "cuda") return MakeCuda(options, note);
  if (name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend: expected auto, cpu, cuda or reference, got ", name));
  }
  absl::StatusOr<std::vector<Device>> cuda = MakeCuda(options, note);
  if (cuda.ok()) return cuda;
  if (note != nullptr) *note = absl::StrCat("cpu engine: ", cuda.status().message());
  return MakeCpu(options);
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view name,
                                                     const BackendOptions& options,
                                                     std::string* note) {
  BackendOptions one = options;
  if (one.devices.empty()) one.devices = {0};
  ASSIGN_OR_RETURN(std::vector<Device> devices, MakeDevices(name, one, note));
  return std::move(devices.front().attention);
}

}  // namespace attnd
