// Dropout parts: of backward whose dropout a kernel decides ahead (KernelRow::dropout_ahead), which
// tiles are decided at a time, and where the decisions of each stand. A round of a tile takes a bit
// a score; what does not fit kMaxDropoutBytes together is decided part by part, each after the
// backward of the one before. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rules/tile_math.h"

namespace attnd::cuda {

// A part is then at least 1.5 ms of an H100's, so that what idles at its end is little.
inline constexpr int64_t kMaxDropoutBytes = int64_t{256} << 20;

struct DropoutParts {
  std::vector<uint32_t> first_rounds;  // of each tile: rounds of its part before its own
  std::vector<int64_t> ends;           // of each part: the first tile after it
  int64_t bytes = 0;                   // of the largest part's decisions
};
// `rows`: those that each tile visits, in whole rounds of tile.q_rows.
DropoutParts CutForDropout(const std::vector<int64_t>& rows, const Tile& tile,
                           int64_t max_bytes = kMaxDropoutBytes);

// What the decisions of a problem take at most, in a launch of any problems: of `tiles` tiles of
// keys, each visited by rounds of at most `rows` rows of each query head of a group.
int64_t DropoutBytes(int64_t tiles, int64_t rows, int64_t group, const Tile& tile);

}  // namespace attnd::cuda
