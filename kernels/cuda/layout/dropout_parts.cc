#include "kernels/cuda/layout/dropout_parts.h"

#include <algorithm>

#include "base/round_up.h"

namespace attnd::cuda {
namespace {

int64_t RoundBytes(const Tile& tile) { return int64_t{tile.q_rows} * tile.kv_rows / 8; }

}  // namespace

DropoutRound ForwardRound(const Tile& tile) { return {tile.kv_rows, RoundBytes(tile)}; }
DropoutRound BackwardRound(const Tile& tile) { return {tile.q_rows, RoundBytes(tile)}; }

DropoutParts CutForDropout(const std::vector<int64_t>& visited, const DropoutRound& round,
                           int64_t max_bytes, int64_t tiles_at_once) {
  const int64_t max_rounds = max_bytes / round.bytes, size = static_cast<int64_t>(visited.size());
  auto rounds_of = [&](int64_t n) { return visited[static_cast<size_t>(n)] / round.visited; };
  DropoutParts parts;
  parts.first_rounds.reserve(visited.size());
  int64_t most = 0, end = 0;
  for (int64_t begin = 0; begin < size; begin = end) {
    int64_t fitting = 0;
    while (end < size && (end == begin || fitting + rounds_of(end) <= max_rounds)) {
      fitting += rounds_of(end++);
    }
    if (end < size && end - begin > tiles_at_once) end -= (end - begin) % tiles_at_once;
    int64_t taken = 0;
    for (int64_t n = begin; n < end; ++n) {
      parts.first_rounds.push_back(static_cast<uint32_t>(taken));
      taken += rounds_of(n);
    }
    parts.ends.push_back(end);
    most = std::max(most, taken);
  }
  parts.bytes = most * round.bytes;
  return parts;
}

int64_t DropoutBytes(int64_t tiles, int64_t visited, int64_t heads, const DropoutRound& round) {
  const int64_t longest = DivideUp(visited, round.visited) * heads * round.bytes;
  return std::min(tiles * longest, std::max(longest, kMaxDropoutBytes));
}

}  // namespace attnd::cuda
