// EmulatedRows: which rows of the kernel table the emulator has. The compiler takes half a second
// for most of them. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "kernels/tiles.h"

namespace attnd {

std::vector<KernelRow> EmulatedRows(Architecture architecture);

// "sm70 forward_d64_f32_linear": no other row has it.
std::string EmulatedName(const KernelRow& row);

}  // namespace attnd
