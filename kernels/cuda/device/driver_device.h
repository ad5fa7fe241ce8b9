// DriverDevice: one NVIDIA GPU as a KernelDevice: three streams (uploads, kernels, downloads) that
// all launches share, linked by each launch's events; memory from a pool that is filled at the
// start; kernels loaded at the start. On the way of a request no driver call allocates from the
// operating system or waits for the device.
//
// After a result that loses the context (IsSticky) every launch fails with IsDeviceLost.
// Threads: any; the context is made current where needed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/driver/driver.h"
#include "kernels/cuda/driver/handles.h"

namespace attnd::cuda {

struct DriverDeviceOptions {
  int ordinal = 0;
  std::string driver_library = std::string(kDriverLibrary);
  std::string kernel_cache = "";    // see KernelCache
  double memory_fraction = 0.9;     // of the memory that is free at the start
  double max_slice_seconds = 0.05;  // of one kernel
  int launches = 4;                 // at once
  // For benchmarks and fault tests: asked before each kernel; true when it has enqueued something
  // in its place.
  std::function<absl::StatusOr<bool>(const Driver&, StreamRef, const KernelStep&)> stand_in =
      nullptr;
};

// How many GPUs the driver sees; FAILED_PRECONDITION, one line, where there is none.
absl::StatusOr<int> CountDevices(const std::string& driver_library = std::string(kDriverLibrary));

// FAILED_PRECONDITION, one line, where there is no driver, no such GPU, one that is too old, or one
// whose memory another process holds.
absl::StatusOr<std::unique_ptr<KernelDevice>> MakeDriverDevice(const DriverDeviceOptions& options);

}  // namespace attnd::cuda
