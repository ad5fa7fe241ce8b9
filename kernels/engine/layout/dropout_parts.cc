#include "kernels/engine/layout/dropout_parts.h"

#include <algorithm>

#include "base/round_up.h"

namespace attnd::cuda {
namespace {

int64_t RoundBytes(const Tile& tile) { return int64_t{tile.q_rows} * tile.kv_rows / 8; }

}  // namespace

DropoutParts CutForDropout(const std::vector<int64_t>& rows, const Tile& tile, int64_t max_bytes) {
  const int64_t max_rounds = max_bytes / RoundBytes(tile);
  DropoutParts parts;
  parts.first_rounds.reserve(rows.size());
  int64_t taken = 0, most = 0;
  for (const int64_t visited : rows) {
    const int64_t rounds = visited / tile.q_rows;
    if (taken > 0 && taken + rounds > max_rounds) {
      parts.ends.push_back(static_cast<int64_t>(parts.first_rounds.size()));
      taken = 0;
    }
    parts.first_rounds.push_back(static_cast<uint32_t>(taken));
    taken += rounds;
    most = std::max(most, taken);
  }
  parts.ends.push_back(static_cast<int64_t>(rows.size()));
  parts.bytes = most * RoundBytes(tile);
  return parts;
}

int64_t DropoutBytes(int64_t tiles, int64_t rows, int64_t group, const Tile& tile) {
  const int64_t longest = DivideUp(rows, tile.q_rows) * group * RoundBytes(tile);
  return std::min(tiles * longest, std::max(longest, kMaxDropoutBytes));
}

}  // namespace attnd::cuda
