// SM cycles per visited tile, used to choose between kernels of masked calls (mask_choice.h). Pure
// functions; any thread.
#pragma once

#include "kernels/tiles.h"

namespace attnd::cuda {

// Cycles of an SM for a tile that a mask lists, FULL or PARTIAL, and for a block besides. Of sm_70
// simulated (`./dev volta-report --visits`); of others measured on an H100, over random lists of
// all tiles and of one in twenty.
struct VisitCycles {
  float full = 0, partial = 0, block = 0;
};

// Returns the cycles of a kernel of listed tiles, small ones or others; zeros where there are no
// small ones to choose.
VisitCycles CyclesOf(const KernelRow& row);

}  // namespace attnd::cuda
