// FindEmulatedKernel: from a row of the kernel table to the host function that the emulator runs.
// write_emulated_kernels.cc generates the sources that instantiate those functions and add them
// here before main. Any thread.
#pragma once

#include <initializer_list>

#include "kernels/tiles.h"
#include "tests/emulator/emulated_kernel.h"

namespace attnd {

// None for a row that is not emulated (emulated_rows.h).
EmulatedKernel FindEmulatedKernel(const KernelRow& row);

struct NamedEmulatedKernel {
  const char* name;  // EmulatedName of its row
  EmulatedKernel kernel;
};
// Before main. Returns true, for the variable whose initialiser calls it.
bool AddEmulatedKernels(std::initializer_list<NamedEmulatedKernel> kernels);

}  // namespace attnd
