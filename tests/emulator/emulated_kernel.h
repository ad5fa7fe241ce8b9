// EmulatedKernel: a kernel as the emulator runs it, a host function. What entry.cuh is on a device.
// Any thread.
#pragma once

#include "tests/emulator/block.h"
#include "kernels/rules/params.h"

namespace attnd {

struct EmulatedKernel {
  void (*run)(const LaunchParams& params, const emulator::Place& at,
              int blocks) = nullptr;  // null: none
  int threads = 0;
  int64_t shared_bytes = 0;
};

template <class Kernel>
EmulatedKernel EmulatedEntry() {
  auto run = [](const LaunchParams& params, const emulator::Place& at, int blocks) {
    Kernel::Run(params, ThreadIndex{at.thread, static_cast<int>(at.block.x), blocks},
                *reinterpret_cast<typename Kernel::Shared*>(at.shared));
  };
  return {run, Kernel::kThreads, sizeof(typename Kernel::Shared)};
}

}  // namespace attnd
