// The draw of RandomBlocks (mask_spec.h), for rows of blocks in order. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/masks/key_run.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

// The blocks that row of blocks `row_block` draws of `key_blocks`, in the order of the draw.
// `excluded`: runs of blocks that are no candidates, ascending and disjoint. Time and memory by
// per_row and the number of runs.
std::vector<uint32_t> DrawRandomBlocks(const RandomBlocks& random, int64_t row_block, int64_t head,
                                       int64_t key_blocks, const std::vector<KeyRun>& excluded);

}  // namespace attnd
