// EmulatedDevice: the kernels of one architecture in the emulator, as a KernelDevice. Regions of
// the arena are held to their use: a kernel that reads beyond a tensor, writes an input or reads
// what nothing wrote ends the launch with INTERNAL. Launches of several threads run side by side.
#pragma once

#include <memory>
#include <vector>

#include "tests/emulator/block.h"
#include "kernels/cuda/device/kernel_device.h"

namespace attnd::cuda {

struct EmulatedDeviceOptions {
  Architecture architecture = Architecture::kSm70;
  int multiprocessors = 2;
  emulator::SharedMemory::Options shared = {.count_conflicts = false, .detect_races = false};
  double max_slice_seconds = 1e9;
  int64_t mask_bytes = int64_t{1} << 20;
  // Rows that the device is to lack.
  std::function<bool(const KernelRow&)> lacks;
  // Receives the bank report of each kernel that ran, if conflicts are counted.
  std::function<void(const KernelRow&, const emulator::LaunchReport&)> observer;
};

std::unique_ptr<KernelDevice> MakeEmulatedDevice(const EmulatedDeviceOptions& options);

}  // namespace attnd::cuda
