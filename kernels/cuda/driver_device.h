// DriverDevice: one NVIDIA GPU as a KernelDevice. The arena is one allocation that grows to the
// largest launch so far and is kept; copies are synchronous.
// Threads: one at a time; any thread, the context is made current where needed.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/kernel_device.h"
#include "kernels/driver/driver.h"

namespace attnd::cuda {

struct DriverDeviceOptions {
  int ordinal = 0;
  std::string driver_library = std::string(kDriverLibrary);
  std::string kernel_cache = "";  // see KernelCache
};

// FAILED_PRECONDITION, one line, where there is no driver, no such GPU, or one that is too old.
absl::StatusOr<std::unique_ptr<KernelDevice>> MakeDriverDevice(const DriverDeviceOptions& options);

}  // namespace attnd::cuda
