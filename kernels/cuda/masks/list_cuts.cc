#include "kernels/cuda/masks/list_cuts.h"

#include <algorithm>
#include <set>

#include "base/round_up.h"
#include "kernels/rules/mask_words.h"

namespace attnd::cuda {
namespace {

// A line is cut that visits at least so many keys (rows), of small tiles, which are one warp's,
// half as many, and several times what lines do on average: else merging costs more than blocks
// wait.
constexpr int64_t kLeastVisited = 8192, kTimesMean = 4;
// At most, of a mask: each run of a line is a problem of the launch.
constexpr size_t kMostLines = 64;

const MaskLists& SideOf(const MaskPlan& plan, const MaskTiling& tiling) {
  return tiling.by_keys ? plan.by_keys : plan.by_rows;
}

int64_t LeastTiles(const MaskTiling& tiling) {
  const int own = tiling.by_keys ? tiling.keys : tiling.rows;
  const int visited = tiling.by_keys ? tiling.rows : tiling.keys;
  return DivideUp(own <= kMaskSquare ? kLeastVisited / 2 : kLeastVisited, int64_t{visited});
}

std::vector<int32_t> LongLines(const CompiledMask& mask, const MaskTiling& tiling, int64_t least) {
  std::set<int32_t> lines;
  for (const MaskPlan& plan : mask.plans()) {
    const MaskLists& lists = SideOf(plan, tiling);
    for (int64_t line = 0; line < lists.lines(); ++line) {
      if (lists.Visits(line) >= least) lines.insert(static_cast<int32_t>(line));
    }
  }
  return {lines.begin(), lines.end()};
}

}  // namespace

bool MayCut(const CompiledMask& own, const MaskTiling& tiling) {
  return !LongLines(own, tiling, LeastTiles(tiling)).empty();
}

ListCuts CutsOf(const CompiledMask& whole, const CompiledMask& own, const MaskTiling& tiling) {
  int64_t tiles = 0, lines = 0;
  for (const MaskPlan& plan : whole.plans()) {
    const MaskLists& lists = SideOf(plan, tiling);
    tiles += static_cast<int64_t>(lists.tiles.size());
    lines += lists.lines();
  }
  if (lines == 0) return {};
  const int64_t least = std::max(LeastTiles(tiling), DivideUp(kTimesMean * tiles, lines));
  if (LongLines(whole, tiling, least).size() > kMostLines) return {};
  return {.least = least, .lines = LongLines(own, tiling, least)};
}

}  // namespace attnd::cuda
