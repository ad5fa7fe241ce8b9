// MaskPlan: which tiles of one mask hold a visible score, listed by rows for forward and by keys
// for backward, with the bits of those that are not full. What engines read (compiled_mask.h makes
// it). Immutable once made; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace attnd {

struct MaskTileSize {
  int32_t rows = 0, keys = 0;  // 1..kMaxMaskTile each
  friend bool operator==(const MaskTileSize&, const MaskTileSize&) = default;
};
inline constexpr int32_t kMaxMaskTile = 1024;

inline constexpr uint32_t kFullMaskTile = 0xffffffff;

// A listed tile. Eight bytes, so that neither number can overflow.
struct MaskTile {
  uint32_t tile;    // by_rows: tile of keys; by_keys: tile of rows
  uint32_t bitmap;  // in MaskPlan::bitmaps, or kFullMaskTile
  bool is_full() const { return bitmap == kFullMaskTile; }
  friend bool operator==(const MaskTile&, const MaskTile&) = default;
};

// Line n lists tiles[offsets[n] .. offsets[n + 1]), ascending.
struct MaskLists {
  std::vector<uint32_t> offsets;  // [lines + 1]
  std::vector<MaskTile> tiles;
  int64_t lines() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t Visits(int64_t line) const { return offsets[line + 1] - offsets[line]; }
  absl::Span<const MaskTile> Line(int64_t line) const {
    return absl::MakeConstSpan(tiles).subspan(offsets[line], Visits(line));
  }
  int64_t bytes() const {
    return static_cast<int64_t>(offsets.size() * sizeof(uint32_t) +
                                tiles.size() * sizeof(MaskTile));
  }
};

struct MaskPlan {
  MaskTileSize tile;
  int64_t rows = 0, keys = 0;  // the call's
  MaskLists by_rows;           // lines are tiles of rows: forward
  MaskLists by_keys;           // lines are tiles of keys: backward; the same tiles and bitmaps
  // Distinct bitmaps of partial tiles, tile.rows · words_per_row words each: key c of row r is bit
  // c mod 32 of word r·words_per_row + c / 32.
  std::vector<uint32_t> bitmaps;
  int32_t words_per_row = 0;       // ⌈tile.keys / 32⌉
  std::vector<uint32_t> row_keys;  // [rows]: visible keys of each row; empty unless asked for
  int64_t visible = 0;             // (row, key) pairs
  int64_t full_tiles = 0, partial_tiles = 0;
  int64_t empty_rows = 0;
  int64_t first_empty_row = -1;  // −1: none

  int64_t bitmap_count() const;
  absl::Span<const uint32_t> Bitmap(uint32_t number) const;
  int64_t bytes() const;
  // Visible keys of `row` in [begin, end): what zero_rest and EmptyRow::kReject ask after options
  // have cut the row. Needs by_rows. O(tiles of the line in the range).
  int64_t CountVisible(int64_t row, int64_t begin, int64_t end) const;
};

}  // namespace attnd
