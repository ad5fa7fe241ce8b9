// From a tree to a plan: rectangles of tiles are split while they hold both visible and hidden
// scores; a tile that still does is looked at bit by bit. Work grows with the borders of what is
// visible. Any thread; a budget is one thread's.
#pragma once

#include <cstdint>

#include "attention/masks/mask_plan.h"
#include "attention/masks/mask_tree.h"

namespace attnd {

// A problem's rows and keys in the mask: its row 0 is (query, row), its key 0 is key_begin.
struct TileGrid {
  MaskTileSize tile;
  int64_t query = 0, row = 0, key_begin = 0;
  int64_t rows = 0, keys = 0;
  int64_t row_tiles() const { return (rows + tile.rows - 1) / tile.rows; }
  int64_t key_tiles() const { return (keys + tile.keys - 1) / tile.keys; }
};

// Estimates what CompileTiles will take, by random descents (Knuth, "Estimating the efficiency of
// backtrack programs", 1975) within `probe_steps` or little more. A descent that ends early counts
// the least that may follow: the longer side of its rectangle.
struct CompileEstimate {
  double steps = 0, bytes = 0;
};
CompileEstimate EstimateTiles(const MaskTree& tree, const TileGrid& grid, int64_t probe_steps);

// Fills all of a plan but row_keys. Ends early, with a useless plan, where the budget is spent.
// Listed tiles' memory is counted in the budget.
MaskPlan CompileTiles(const MaskTree& tree, const TileGrid& grid, CompileBudget& budget);

}  // namespace attnd
