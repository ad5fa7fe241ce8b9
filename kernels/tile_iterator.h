// Which tiles a block visits, in order, each tagged FULL (every score of it is visible: no mask
// code runs) or PARTIAL. Tiles with no visible score are not visited. Kernels ask for the n-th
// visit only, so a list of tiles can take the place of the range without touching a loop.
#pragma once

#include "attention/score_rule.h"
#include "base/hd.h"

namespace attnd {

// Tiles of `tile_keys` keys that rows [row_begin, row_end) of a sequence see; the keys of a tile
// start at First(n).
class KeyTiles {
 public:
  ATTN_HD KeyTiles(Visibility visibility, int row_begin, int row_end, int tile_keys,
                   bool all_partial)
      : tile_keys_(tile_keys) {
    Range any = VisibleKeys(visibility, row_begin, row_end);
    Range all = KeysVisibleToAll(visibility, row_begin, row_end);
    int first = any.begin / tile_keys, last = (any.end + tile_keys - 1) / tile_keys;
    first_ = first * tile_keys;
    count_ = any.begin < any.end ? last - first : 0;
    int full_begin = (all.begin + tile_keys - 1) / tile_keys, full_end = all.end / tile_keys;
    full_begin_ = full_begin - first;
    full_count_ = all_partial || full_end <= full_begin ? 0 : full_end - full_begin;
  }
  ATTN_HD int count() const { return count_; }
  ATTN_HD int First(int visit) const { return first_ + visit * tile_keys_; }
  ATTN_HD bool IsPartial(int visit) const {
    return static_cast<uint32_t>(visit - full_begin_) >= static_cast<uint32_t>(full_count_);
  }

 private:
  int tile_keys_, first_, count_, full_begin_, full_count_;
};

// Tiles of `tile_rows` rows that see at least one of the keys [key_begin, key_end); rows of a tile
// start at First(n).
class RowTiles {
 public:
  ATTN_HD RowTiles(Visibility visibility, int key_begin, int key_end, int tile_rows,
                   bool all_partial)
      : tile_rows_(tile_rows) {
    Range any = RowsThatSee(visibility, key_begin, key_end);
    Range all = RowsThatSeeAll(visibility, key_begin, key_end);
    int first = any.begin / tile_rows, last = (any.end + tile_rows - 1) / tile_rows;
    first_ = first * tile_rows;
    count_ = any.begin < any.end ? last - first : 0;
    int full_begin = (all.begin + tile_rows - 1) / tile_rows, full_end = all.end / tile_rows;
    full_begin_ = full_begin - first;
    full_count_ = all_partial || full_end <= full_begin ? 0 : full_end - full_begin;
  }
  ATTN_HD int count() const { return count_; }
  ATTN_HD int First(int visit) const { return first_ + visit * tile_rows_; }
  ATTN_HD bool IsPartial(int visit) const {
    return static_cast<uint32_t>(visit - full_begin_) >= static_cast<uint32_t>(full_count_);
  }

 private:
  int tile_rows_, first_, count_, full_begin_, full_count_;
};

}  // namespace attnd
