// Which tiles a block visits, in order, each tagged FULL (every score of it is visible: no mask
// code runs) or PARTIAL. Tiles with no visible score are not visited. Kernels ask for the n-th
// visit only, so a list of tiles can take the place of the range without touching a loop.
#pragma once

#include "attention/score_rule.h"
#include "base/hd.h"

namespace attnd {

// Tiles of `size` positions (keys in forward, rows in backward) that hold a position of `any`;
// those that reach out of `all` are cut, and PARTIAL; with `all_partial` every tile is, because
// scores are hidden for other reasons than their place. The positions of a tile start at First(n).
class TileVisits {
 public:
  ATTN_HD TileVisits(Range any, Range all, int size, bool all_partial)
      : size_(size), all_partial_(all_partial) {
    int first = any.begin / size, last = (any.end + size - 1) / size;
    first_ = first * size;
    count_ = any.begin < any.end ? last - first : 0;
    int full_begin = (all.begin + size - 1) / size, full_end = all.end / size;
    full_begin_ = full_begin - first;
    full_count_ = full_end <= full_begin ? 0 : full_end - full_begin;
  }
  ATTN_HD int count() const { return count_; }
  ATTN_HD int First(int visit) const { return first_ + visit * size_; }
  ATTN_HD bool IsPartial(int visit) const { return all_partial_ || IsCut(visit); }
  ATTN_HD bool IsCut(int visit) const {
    return static_cast<uint32_t>(visit - full_begin_) >= static_cast<uint32_t>(full_count_);
  }

 private:
  int size_, first_, count_, full_begin_, full_count_;
  bool all_partial_;
};

// Tiles of keys that rows [row_begin, row_end) of a sequence see.
ATTN_HD TileVisits KeyTiles(Visibility visibility, int row_begin, int row_end, int tile_keys,
                            bool all_partial) {
  return TileVisits(VisibleKeys(visibility, row_begin, row_end),
                    KeysVisibleToAll(visibility, row_begin, row_end), tile_keys, all_partial);
}

// Tiles of rows that see at least one of the keys [key_begin, key_end).
ATTN_HD TileVisits RowTiles(Visibility visibility, int key_begin, int key_end, int tile_rows,
                            bool all_partial) {
  return TileVisits(RowsThatSee(visibility, key_begin, key_end),
                    RowsThatSeeAll(visibility, key_begin, key_end), tile_rows, all_partial);
}

}  // namespace attnd
