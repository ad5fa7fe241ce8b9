// Tile work: which tiles each kernel of a launch visits, one a block, most work first where it
// differs. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/cuda/layout/launch_layout.h"
#include "kernels/cuda/masks/mask_cache.h"
#include "kernels/rules/params.h"
#include "kernels/rules/tile_math.h"

namespace attnd::cuda {

// Tiles with the keys (rows) that each visits. Of a line that is cut (CallMask::cuts) each run is
// one, and `merged` has its rows once more, kMergedRows at a time, with its first run's problem.
struct OrderedTiles {
  std::vector<TileWork> tiles;
  std::vector<int64_t> work;
  std::vector<TileWork> merged;
};
// Tiles of rows of every (part, batch entry, query head), those with most visited keys in time.
// `masks`: of each call, or nothing. `first_runs`: of each part the problem of the first run of the
// first line that its call cuts, or nothing.
OrderedTiles ForwardTiles(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                          const Tile& of, absl::Span<const CallMask> masks,
                          absl::Span<const size_t> first_runs = {});
// Tiles of keys of every (part, batch entry, KV head), likewise by the rows of all its query heads.
OrderedTiles BackwardTiles(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                           const Tile& of, absl::Span<const CallMask> masks,
                           absl::Span<const size_t> first_runs = {});
// Every (part, batch entry, query head).
std::vector<TileWork> HeadTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts);
// 16×16 numbers of every wanted bias gradient; those of a part of a call are the part's own.
std::vector<TileWork> BiasTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts);
// 64 rows of every head of O and V of the parts whose call keeps rows (CallLayout).
std::vector<TileWork> KeepRowsTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts);
// Every line of every (batch entry, head) of every bool mask, in the part that it begins.
std::vector<TileWork> MaskLineTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts);
int64_t MaskLineCount(const CallLayout& layout);
// 64 rows of every (part, batch entry, query head): what the Delta and dQ kernels visit.
std::vector<TileWork> RowBlockTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts);

}  // namespace attnd::cuda
