// CapturedMap: the attention map of a forward, averaged over batch entries and heads,
//     A[i][j] = 1 / (batch · q_heads) · Σ exp(S[b][h][i][j] − lse[b][h][i])
// with the probabilities before dropout, 0 where a key is not visible and in rows without any. As
// SPION and SAT capture it (docs/NUMERICS.md).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/patterns/attention_map.h"

namespace attnd {

struct CapturedMap {
  std::vector<float> pooled;  // the average of each block, [row_blocks, key_blocks]
  double mean = 0, variance = 0;
  double skewness = 0;     // NaN where all entries are equal
  std::vector<float> map;  // A itself [rows, keys], if asked for
};

// MapSums: the sums of a map that comes in tiles. Each tile's are its own, so that tiles may be
// added on any thread; their order in the result is that of the grid.
class MapSums {
 public:
  // Tiles are tile_rows × tile_keys but for the last ones of the grid.
  MapSums(const MapShape& shape, int64_t tile_rows, int64_t tile_keys);

  int64_t row_tiles() const { return row_tiles_; }
  int64_t key_tiles() const { return key_tiles_; }

  // Adds one tile of the grid: its averages, rows of `stride` floats. Called once for each tile.
  void Add(int64_t row_tile, int64_t key_tile, const float* averages, int64_t stride);

  // The same of a tile whose sums somebody else made: of its blocks, row by row of them, as far as
  // they lie in it, and Σ(x − 1/keys), its squares, its cubes. Returns where its blocks' sums end.
  const double* AddTile(int64_t row_tile, int64_t key_tile, const double* blocks,
                        const double* moments);

  // After all tiles: everything but `map`.
  CapturedMap Finish() const;

 private:
  struct Tile {
    int64_t row, key, rows, keys;  // its place in the map
    int64_t row_block, key_block;  // its first block
    int64_t row_blocks, key_blocks;
  };
  Tile TileAt(int64_t row_tile, int64_t key_tile) const;

  MapShape shape_;
  int64_t tile_rows_, tile_keys_, row_tiles_, key_tiles_;
  std::vector<std::vector<double>> blocks_;  // of each tile, [row_blocks, key_blocks]
  std::vector<PowerSums> moments_;           // of each tile
};

}  // namespace attnd
