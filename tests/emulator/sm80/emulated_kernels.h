// The sm80 kernels as the emulator runs them: from a row of the kernel table to a host function, or
// to none. Any thread.
#pragma once

#include "tests/emulator/emulated_kernel.h"
#include "kernels/tiles.h"

namespace attnd::sm80 {

EmulatedKernel FindEmulatedKernel(const KernelRow& row);
EmulatedKernel FindEmulatedFloatKernel(const KernelRow& row);  // of float32
EmulatedKernel FindEmulatedProduct(const KernelRow& row);      // of layers, else none

}  // namespace attnd::sm80
