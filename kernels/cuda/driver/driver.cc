#include "kernels/cuda/driver/driver.h"

#include <dlfcn.h>

#include <cstdlib>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/cuda/driver/symbols.h"

namespace attnd {
namespace {

constexpr absl::string_view kResultPayload = "attnd/CUresult";

absl::Status Unusable(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      what, "; the cuda backend needs an NVIDIA driver of at least ", kMinimumDriverName));
}

void FindMemoryAndStreams(Symbols& symbols, DriverFunctions& f) {
  symbols.Find(f.memory_get_info, "cuMemGetInfo_v2");
  symbols.Find(f.pool_create, "cuMemPoolCreate");
  symbols.Find(f.pool_destroy, "cuMemPoolDestroy");
  symbols.Find(f.pool_set_attribute, "cuMemPoolSetAttribute");
  symbols.Find(f.pool_get_attribute, "cuMemPoolGetAttribute");
  symbols.Find(f.pool_allocate, "cuMemAllocFromPoolAsync");
  symbols.Find(f.pool_free, "cuMemFreeAsync");
  symbols.Find(f.host_allocate, "cuMemHostAlloc");
  symbols.Find(f.host_free, "cuMemFreeHost");
  symbols.Find(f.host_register, "cuMemHostRegister_v2");
  symbols.Find(f.host_unregister, "cuMemHostUnregister");
  symbols.Find(f.copy_to_device, "cuMemcpyHtoDAsync_v2");
  symbols.Find(f.copy_to_host, "cuMemcpyDtoHAsync_v2");
  symbols.Find(f.copy_rows, "cuMemcpy2DAsync_v2");
  symbols.Find(f.set_bytes, "cuMemsetD8Async");
  symbols.Find(f.stream_create, "cuStreamCreate");
  symbols.Find(f.stream_destroy, "cuStreamDestroy_v2");
  symbols.Find(f.stream_synchronize, "cuStreamSynchronize");
  symbols.Find(f.stream_wait_event, "cuStreamWaitEvent");
  symbols.Find(f.event_create, "cuEventCreate");
  symbols.Find(f.event_destroy, "cuEventDestroy_v2");
  symbols.Find(f.event_record, "cuEventRecord");
  symbols.Find(f.event_query, "cuEventQuery");
  symbols.Find(f.event_elapsed_time, "cuEventElapsedTime");
}

void FindDevicesAndModules(Symbols& symbols, DriverFunctions& f) {
  symbols.Find(f.init, "cuInit");
  symbols.Find(f.get_error_name, "cuGetErrorName");
  symbols.Find(f.get_error_string, "cuGetErrorString");
  symbols.Find(f.device_get_count, "cuDeviceGetCount");
  symbols.Find(f.device_get, "cuDeviceGet");
  symbols.Find(f.device_get_name, "cuDeviceGetName");
  symbols.Find(f.device_get_uuid, "cuDeviceGetUuid");
  symbols.Find(f.device_get_pci_bus_id, "cuDeviceGetPCIBusId");
  symbols.Find(f.device_get_attribute, "cuDeviceGetAttribute");
  symbols.Find(f.device_total_mem, "cuDeviceTotalMem_v2");
  symbols.Find(f.primary_context_retain, "cuDevicePrimaryCtxRetain");
  symbols.Find(f.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  symbols.Find(f.context_set_current, "cuCtxSetCurrent");
  symbols.Find(f.context_synchronize, "cuCtxSynchronize");
  symbols.Find(f.module_load_data, "cuModuleLoadData");
  symbols.Find(f.module_unload, "cuModuleUnload");
  symbols.Find(f.module_get_function, "cuModuleGetFunction");
  symbols.Find(f.function_set_attribute, "cuFuncSetAttribute");
  symbols.Find(f.launch_kernel, "cuLaunchKernel");
  symbols.Find(f.launch_with_attributes, "cuLaunchKernelEx");
  symbols.Find(f.tensor_map_encode, "cuTensorMapEncodeTiled");
}

std::string FormatUuid(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppend(&text, absl::Hex(static_cast<unsigned char>(uuid.bytes[i]), absl::kZeroPad2));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Driver>> Driver::Load(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Unusable(absl::StrCat("no NVIDIA driver: ", dlerror()));
  auto driver = std::unique_ptr<Driver>(new Driver());
  DriverFunctions& f = driver->functions_;
  // The version first: an old library may lack what is looked up next.
  Symbols symbols(library);
  symbols.Find(f.driver_get_version, "cuDriverGetVersion");
  if (!symbols.missing().empty()) return Unusable(absl::StrCat(name, " is no CUDA driver"));
  if (f.driver_get_version(&driver->version_) != CUDA_SUCCESS) {
    return Unusable(absl::StrCat(name, " does not tell its version"));
  }
  if (driver->version_ < kMinimumDriverVersion) {
    return Unusable(absl::StrFormat("the NVIDIA driver is too old: it speaks CUDA %d.%d",
                                    driver->version_ / 1000, driver->version_ % 1000 / 10));
  }
  FindDevicesAndModules(symbols, f);
  FindMemoryAndStreams(symbols, f);
  if (!symbols.missing().empty()) {
    return Unusable(absl::StrCat(name, " lacks ", symbols.missing()));
  }
  CUresult result = f.init(0);
  if (result == CUDA_ERROR_NO_DEVICE) return Unusable("cuInit: the driver sees no GPU");
  if (result != CUDA_SUCCESS) return Unusable(driver->Check(result, "cuInit").message());
  return driver;
}

absl::StatusOr<int> Driver::DeviceCount() const {
  int count = 0;
  RETURN_IF_ERROR(Check(functions_.device_get_count(&count), "cuDeviceGetCount"));
  return count;
}

absl::StatusOr<DeviceIdentity> Driver::Identify(int ordinal) const {
  const DriverFunctions& f = functions_;
  DeviceIdentity identity;
  identity.ordinal = ordinal;
  CUdevice device;
  RETURN_IF_ERROR(Check(f.device_get(&device, ordinal), "cuDeviceGet"));
  char text[256] = {};
  RETURN_IF_ERROR(Check(f.device_get_name(text, sizeof(text), device), "cuDeviceGetName"));
  identity.name = text;
  CUuuid uuid;
  RETURN_IF_ERROR(Check(f.device_get_uuid(&uuid, device), "cuDeviceGetUuid"));
  identity.uuid = FormatUuid(uuid);
  RETURN_IF_ERROR(
      Check(f.device_get_pci_bus_id(text, sizeof(text), device), "cuDeviceGetPCIBusId"));
  identity.pci_bus_id = text;
  size_t bytes = 0;
  RETURN_IF_ERROR(Check(f.device_total_mem(&bytes, device), "cuDeviceTotalMem"));
  identity.memory_bytes = static_cast<int64_t>(bytes);
  auto attribute = [&](CUdevice_attribute which, auto& value) {
    int number = 0;
    CUresult result = f.device_get_attribute(&number, which, device);
    value = number;
    return Check(result, "cuDeviceGetAttribute");
  };
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, identity.major));
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, identity.minor));
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, identity.multiprocessors));
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, identity.clock_khz));
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                            identity.shared_bytes_per_block));
  RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, identity.has_memory_pools));
  return identity;
}

absl::Status Driver::Check(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (functions_.get_error_name(result, &name) != CUDA_SUCCESS) name = nullptr;
  if (functions_.get_error_string(result, &text) != CUDA_SUCCESS) text = nullptr;
  absl::Status status = absl::InternalError(absl::StrCat(
      call, ": ", name != nullptr ? name : absl::StrCat("CUresult ", static_cast<int>(result)),
      text != nullptr ? absl::StrCat(" (", text, ")") : ""));
  status.SetPayload(kResultPayload, absl::Cord(absl::StrCat(static_cast<int>(result))));
  return status;
}

std::optional<CUresult> ResultOf(const absl::Status& status) {
  absl::optional<absl::Cord> payload = status.GetPayload(kResultPayload);
  int number = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &number)) return {};
  return static_cast<CUresult>(number);
}

bool IsSticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:      // 214
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:   // 220
    case CUDA_ERROR_CONTAINED:              // 226
    case CUDA_ERROR_ILLEGAL_ADDRESS:        // 700
    case CUDA_ERROR_LAUNCH_TIMEOUT:         // 702
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:   // 709
    case CUDA_ERROR_ASSERT:                 // 710
    case CUDA_ERROR_HARDWARE_STACK_ERROR:   // 714
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:    // 715
    case CUDA_ERROR_MISALIGNED_ADDRESS:     // 716
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:  // 717
    case CUDA_ERROR_INVALID_PC:             // 718
    case CUDA_ERROR_LAUNCH_FAILED:          // 719
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:     // 721
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:  // 810
    case CUDA_ERROR_EXTERNAL_DEVICE:        // 911
      return true;
    default:
      return false;
  }
}

}  // namespace attnd
