// Driver: NVIDIA's driver API (libcuda.so.1), found at run time, so that one binary runs with and
// without a GPU. Nothing else in attnd calls dlopen for it, and nothing links it.
//
// Errors: no library, a library that is too old, no device: FAILED_PRECONDITION, one line that says
// what to do. A call that fails: INTERNAL with the call's and the CUresult's names; ResultOf tells
// which. After a sticky result the process can only be restarted (CUDA Driver API, "Data types used
// by CUDA driver": "the process must be terminated and relaunched").
// Threads: any, once loaded. A Driver outlives everything made from it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

// CUDA 12.0: the oldest driver that loads what NVRTC 12.9 makes (CUDA Compatibility, minor version
// compatibility). Volta's last branch is 580, which is newer.
inline constexpr int kMinimumDriverVersion = 12000;
inline constexpr absl::string_view kMinimumDriverName = "525.60.13 (CUDA 12.0)";
inline constexpr absl::string_view kDriverLibrary = "libcuda.so.1";

// The calls in use, under their names in cuda.h (which maps some to versioned symbols).
struct DriverFunctions {
  decltype(&::cuInit) init;
  decltype(&::cuDriverGetVersion) driver_get_version;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuDeviceGetCount) device_get_count;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetName) device_get_name;
  decltype(&::cuDeviceGetUuid) device_get_uuid;
  decltype(&::cuDeviceGetPCIBusId) device_get_pci_bus_id;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDeviceTotalMem) device_total_mem;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&::cuDevicePrimaryCtxRelease) primary_context_release;
  decltype(&::cuCtxSetCurrent) context_set_current;
  decltype(&::cuCtxSynchronize) context_synchronize;
  decltype(&::cuMemGetInfo) memory_get_info;
  decltype(&::cuMemPoolCreate) pool_create;
  decltype(&::cuMemPoolDestroy) pool_destroy;
  decltype(&::cuMemPoolSetAttribute) pool_set_attribute;
  decltype(&::cuMemPoolGetAttribute) pool_get_attribute;
  decltype(&::cuMemAllocFromPoolAsync) pool_allocate;
  decltype(&::cuMemFreeAsync) pool_free;
  decltype(&::cuMemHostAlloc) host_allocate;
  decltype(&::cuMemFreeHost) host_free;
  decltype(&::cuMemHostRegister) host_register;
  decltype(&::cuMemHostUnregister) host_unregister;
  decltype(&::cuMemcpyHtoDAsync) copy_to_device;
  decltype(&::cuMemcpyDtoHAsync) copy_to_host;
  decltype(&::cuMemcpy2DAsync) copy_rows;
  decltype(&::cuMemsetD8Async) set_bytes;
  decltype(&::cuStreamCreate) stream_create;
  decltype(&::cuStreamDestroy) stream_destroy;
  decltype(&::cuStreamSynchronize) stream_synchronize;
  decltype(&::cuStreamWaitEvent) stream_wait_event;
  decltype(&::cuEventCreate) event_create;
  decltype(&::cuEventDestroy) event_destroy;
  decltype(&::cuEventRecord) event_record;
  decltype(&::cuEventQuery) event_query;
  decltype(&::cuEventElapsedTime) event_elapsed_time;
  decltype(&::cuModuleLoadData) module_load_data;
  decltype(&::cuModuleUnload) module_unload;
  decltype(&::cuModuleGetFunction) module_get_function;
  decltype(&::cuFuncSetAttribute) function_set_attribute;
  decltype(&::cuLaunchKernel) launch_kernel;
  decltype(&::cuLaunchKernelEx) launch_with_attributes;
  decltype(&::cuTensorMapEncodeTiled) tensor_map_encode;
};

struct DeviceIdentity {
  int ordinal = 0;
  std::string name;
  std::string uuid;          // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string pci_bus_id;    // "0000:3b:00.0"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t clock_khz = 0;
  int64_t shared_bytes_per_block = 0;  // with opt-in
  bool has_memory_pools = false;
};

class Driver {
 public:
  // Opens the library, checks its version and calls cuInit.
  static absl::StatusOr<std::unique_ptr<Driver>> Load(
      const std::string& library = std::string(kDriverLibrary));
  // The library stays open: threads of its own may still run.
  ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const DriverFunctions& functions() const { return functions_; }
  int version() const { return version_; }  // 12090 is CUDA 12.9

  absl::StatusOr<int> DeviceCount() const;
  absl::StatusOr<DeviceIdentity> Identify(int ordinal) const;

  // OK, or INTERNAL "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  absl::Status Check(CUresult result, absl::string_view call) const;

 private:
  Driver() = default;
  DriverFunctions functions_ = {};
  int version_ = 0;
};

// The CUresult that a Status of Check carries; nothing for any other Status.
std::optional<CUresult> ResultOf(const absl::Status& status);

// After these the context is lost and every later call fails: the process has to be restarted.
bool IsSticky(CUresult result);
inline bool IsSticky(const absl::Status& status) {
  std::optional<CUresult> result = ResultOf(status);
  return result.has_value() && IsSticky(*result);
}

}  // namespace attnd
