// IsSampled: the kernels that `./dev test` compiles while kernels.lock fits the device code. Every
// kind of kernel, element and architecture is among them, with heads of 64; of other widths only
// the widest with linear scores. No test without a GPU runs a compiled kernel, so the rest would
// prove no more than the lock, which was written when all of them were compiled.
#pragma once

#include "kernels/tiles.h"

namespace attnd {

// `compute_capability`: of the archive, 70, 80 or 90. The archive of 90 has sm_80's rows too, whose
// sample stands in sm_80's archive.
bool IsSampled(const KernelRow& row, int compute_capability);

}  // namespace attnd
