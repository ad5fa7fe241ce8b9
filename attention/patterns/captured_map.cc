#include "attention/patterns/captured_map.h"

#include <algorithm>

#include "base/round_up.h"

namespace attnd {

MapSums::MapSums(const MapShape& shape, int64_t tile_rows, int64_t tile_keys)
    : shape_(shape),
      tile_rows_(tile_rows),
      tile_keys_(tile_keys),
      row_tiles_(DivideUp(shape.rows, tile_rows)),
      key_tiles_(DivideUp(shape.keys, tile_keys)),
      blocks_(static_cast<size_t>(row_tiles_ * key_tiles_)),
      moments_(blocks_.size(), PowerSums(1.0 / static_cast<double>(shape.keys))) {}

MapSums::Tile MapSums::TileAt(int64_t row_tile, int64_t key_tile) const {
  Tile tile;
  tile.row = row_tile * tile_rows_;
  tile.key = key_tile * tile_keys_;
  tile.rows = std::min(tile_rows_, shape_.rows - tile.row);
  tile.keys = std::min(tile_keys_, shape_.keys - tile.key);
  tile.row_block = tile.row / shape_.block;
  tile.key_block = tile.key / shape_.block;
  tile.row_blocks = (tile.row + tile.rows - 1) / shape_.block - tile.row_block + 1;
  tile.key_blocks = (tile.key + tile.keys - 1) / shape_.block - tile.key_block + 1;
  return tile;
}

void MapSums::Add(int64_t row_tile, int64_t key_tile, const float* averages, int64_t stride) {
  const Tile tile = TileAt(row_tile, key_tile);
  const int64_t index = row_tile * key_tiles_ + key_tile;
  std::vector<double>& blocks = blocks_[index];
  blocks.assign(static_cast<size_t>(tile.row_blocks * tile.key_blocks), 0.0);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* line = averages + row * stride;
    double* sums = &blocks[((tile.row + row) / shape_.block - tile.row_block) * tile.key_blocks];
    for (int64_t at = 0; at < tile.keys;) {
      const int64_t block = (tile.key + at) / shape_.block;
      const int64_t end = std::min(tile.keys, (block + 1) * shape_.block - tile.key);
      double sum = 0;
      for (; at < end; ++at) {
        sum += line[at];
        moments_[index].Add(line[at]);
      }
      sums[block - tile.key_block] += sum;
    }
  }
}

const double* MapSums::AddTile(int64_t row_tile, int64_t key_tile, const double* blocks,
                               const double* moments) {
  const Tile tile = TileAt(row_tile, key_tile);
  const int64_t index = row_tile * key_tiles_ + key_tile;
  const double* end = blocks + tile.row_blocks * tile.key_blocks;
  blocks_[index].assign(blocks, end);
  moments_[index].Add(tile.rows * tile.keys, moments[0], moments[1], moments[2]);
  return end;
}

CapturedMap MapSums::Finish() const {
  CapturedMap captured;
  std::vector<double> sums(static_cast<size_t>(shape_.row_blocks() * shape_.key_blocks()));
  PowerSums moments = moments_[0];
  for (int64_t index = 0; index < row_tiles_ * key_tiles_; ++index) {
    if (index > 0) moments.Add(moments_[index]);
    const Tile tile = TileAt(index / key_tiles_, index % key_tiles_);
    for (int64_t n = 0; n < tile.row_blocks * tile.key_blocks; ++n) {
      const int64_t row = tile.row_block + n / tile.key_blocks;
      sums[row * shape_.key_blocks() + tile.key_block + n % tile.key_blocks] += blocks_[index][n];
    }
  }
  captured.pooled = BlockAverages(shape_, sums);
  captured.mean = moments.Mean();
  captured.variance = moments.Variance();
  captured.skewness = moments.Skewness();
  return captured;
}

}  // namespace attnd
