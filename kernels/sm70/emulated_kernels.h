// The sm70 kernels as the emulator runs them: from a row of the kernel table to a host function.
// Any thread.
#pragma once

#include "kernels/emulator/block.h"
#include "kernels/rules/params.h"
#include "kernels/tiles.h"

namespace attnd::sm70 {

struct EmulatedKernel {
  void (*run)(const LaunchParams& params, const emulator::Place& at) = nullptr;  // null: none
  int threads = 0;
  int64_t shared_bytes = 0;
};
EmulatedKernel FindEmulatedKernel(const KernelRow& row);

}  // namespace attnd::sm70
