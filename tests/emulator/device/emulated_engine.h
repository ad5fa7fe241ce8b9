// The engine of GPUs on an emulated one.
#pragma once

#include <memory>
#include <optional>

#include "kernels/cuda/cuda_backend.h"
#include "tests/emulator/device/emulated_device.h"

namespace attnd::cuda {

inline std::unique_ptr<CudaBackend> MakeEmulatedEngine(const EmulatedDeviceOptions& options = {},
                                                       std::optional<MaskWay> way = std::nullopt) {
  return std::make_unique<CudaBackend>(MakeEmulatedDevice(options), nullptr, way);
}

// As tables of engines take it.
template <Architecture kArchitecture>
std::unique_ptr<CudaBackend> MakeEmulated() {
  return MakeEmulatedEngine({.architecture = kArchitecture});
}

}  // namespace attnd::cuda
