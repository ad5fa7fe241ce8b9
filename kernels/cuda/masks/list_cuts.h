// ListCuts: which lines of a mask's lists are visited in runs by several blocks
// (kernels/rules/list_runs.h): those that would keep one block at work long after the others, as
// rows that see all keys, or keys that all rows see. The whole mask decides, so that a line is cut
// alike in any batch and shard. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/masks/compiled_mask.h"
#include "kernels/cuda/masks/mask_layout.h"

namespace attnd::cuda {

struct ListCuts {
  int64_t least = 0;           // tiles of a line that is cut; 0: none is
  std::vector<int32_t> lines;  // those that any head's plan cuts, ascending
  bool Cut(const MaskLists& lists, int64_t line) const {
    return least > 0 && lists.Visits(line) >= least;
  }
};

// Whether some line may be cut, whatever the whole mask is.
bool MayCut(const CompiledMask& own, const MaskTiling& tiling);
// Cuts the lists of a call whose part of the mask is `own`, and for whose `whole` mask the same
// tiles are listed.
ListCuts CutsOf(const CompiledMask& whole, const CompiledMask& own, const MaskTiling& tiling);

}  // namespace attnd::cuda
