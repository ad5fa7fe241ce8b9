// The sm90 kernels as the emulator runs them: from a row of the kernel table to a host function, or
// to none. Any thread.
#pragma once

#include "tests/emulator/emulated_kernel.h"
#include "kernels/tiles.h"

namespace attnd::sm90 {

EmulatedKernel FindEmulatedKernel(const KernelRow& row);

}  // namespace attnd::sm90
