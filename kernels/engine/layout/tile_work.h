// Tile work: which tiles each kernel of a launch visits, one a block, most work first where it
// differs. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "kernels/engine/layout/descriptors.h"
#include "kernels/engine/layout/launch_layout.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// Tiles of rows of every (part, batch entry, query head), most visible keys first.
std::vector<TileWork> ForwardTiles(absl::Span<const Problem* const> problems,
                                   absl::Span<const Part> parts, int q_rows);
// Tiles of keys of every (part, batch entry, KV head), most visiting rows first.
std::vector<TileWork> BackwardTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, int kv_rows);
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
std::vector<TileWork> MaskLineTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, const MaskTiling& tiling);
int64_t MaskLineCount(const Problem& problem, const MaskTiling& tiling);
// 64 rows of every (part, batch entry, query head): what the Delta and dQ kernels visit.
std::vector<TileWork> RowBlockTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts);

}  // namespace attnd::cuda
