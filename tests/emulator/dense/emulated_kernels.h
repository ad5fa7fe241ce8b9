// The kernels of this folder for the emulator. Any thread.
#pragma once

#include "tests/emulator/emulated_kernel.h"
#include "kernels/tiles.h"

namespace attnd {

// Of a row of another folder none.
EmulatedKernel FindEmulatedDenseKernel(const KernelRow& row);

}  // namespace attnd
