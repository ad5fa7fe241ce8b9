// Dropout parts: where a kernel decides dropout ahead (KernelRow::dropout_ahead), which tiles are
// decided at a time, and where the decisions of each stand. A round of a tile (forward: a visit)
// takes a bit a score; what does not fit kMaxDropoutBytes together is decided part by part, each
// after the main kernel of the one before. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rules/tile_math.h"

namespace attnd::cuda {

// Holds the decisions for 131,072 keys and 192 queries a tile, as many as run at once on an H100.
inline constexpr int64_t kMaxDropoutBytes = int64_t{512} << 20;
// Blocks of an H100. All parts but the last are multiples of so many tiles, so that few blocks idle
// at their ends: cut elsewhere, forward took 4.7 ms at D 64 and N 16,384, as one part 4.1.
inline constexpr int64_t kDropoutTilesAtOnce = 132;

// A round: so many rows (forward: keys) that a tile visits together, and bytes of its decisions.
struct DropoutRound {
  int64_t visited, bytes;
};
DropoutRound ForwardRound(const Tile& tile);
DropoutRound BackwardRound(const Tile& tile);

struct DropoutParts {
  std::vector<uint32_t> first_rounds;  // of each tile: rounds of its part before its own
  std::vector<int64_t> ends;           // of each part: the first tile after it
  int64_t bytes = 0;                   // of the largest part's decisions
};
// `visited`: rows (keys) that each tile visits, in whole rounds.
DropoutParts CutForDropout(const std::vector<int64_t>& visited, const DropoutRound& round,
                           int64_t max_bytes = kMaxDropoutBytes,
                           int64_t tiles_at_once = kDropoutTilesAtOnce);

// Bounds the bytes of a problem's decisions in a launch of any problems: of `tiles` tiles, each
// visited by rounds of at most `visited` rows (keys) of each of `heads` heads.
int64_t DropoutBytes(int64_t tiles, int64_t visited, int64_t heads, const DropoutRound& round);

}  // namespace attnd::cuda
