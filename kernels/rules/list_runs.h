// Runs: a block's list of tiles that is much longer than others, as that of a row that sees all
// keys, is visited by kListRuns blocks. Each is told of a problem of its own (TileLists::run),
// whose O, lse, dK and dV are float32 and unfinished; merge_runs.h makes of them what they would
// be. Errors: none.
#pragma once

#include "kernels/rules/gradient_scale.h"

namespace attnd {

ATTN_HD bool IsRun(const ProblemDesc& p) { return p.tile_lists.run != 0; }

// Columns c and c + 1 of such a row.
ATTN_HD void StorePair(char* row, int c, float low, float high) {
  ptx::StoreGlobal64(row + c * 4, make_uint2(ptx::FloatBits(low), ptx::FloatBits(high)));
}

}  // namespace attnd
