// Reads a mask's lists (TileLists, params.h) on the device: lines, bitmaps (mask_words.h), and
// single places where speed does not matter.
// Errors: none. Threads: pure functions.
#pragma once

#include "base/hd.h"
#include "kernels/ptx/instructions.h"
#include "kernels/rules/mask_words.h"
#include "kernels/rules/params.h"

namespace attnd {

// The line of own tile `tile` for (b, h), whose tiles may be empty. Needs lists.
ATTN_HD MaskLine LineOf(const TileLists& lists, int batch, int head, int tile) {
  int64_t plan = batch * lists.batch + head * lists.head;
  if (lists.plan_of != nullptr) plan = ptx::LoadConstant32(lists.plan_of + plan);
  const int line = lists.plan_lines == 1 ? 0 : tile;
  const uint4 words = ptx::LoadConstant128(lists.lines + plan * lists.plan_lines + line);
  return {words.x, words.y, words.z, 0};
}
// The first of tiles [begin, end) whose number is at least `tile`. Mostly it is at one of the ends.
ATTN_HD uint32_t FirstListed(const uint32_t* tiles, uint32_t begin, uint32_t end, int tile) {
  if (begin == end) return end;
  const uint32_t first = ptx::LoadConstant32(tiles + begin) & kListedTileMask;
  const uint32_t last = ptx::LoadConstant32(tiles + end - 1) & kListedTileMask;
  if (static_cast<int>(first) >= tile) return begin;
  if (static_cast<int>(last) < tile) return end;
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    const uint32_t number = ptx::LoadConstant32(tiles + middle) & kListedTileMask;
    if (static_cast<int>(number) < tile) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// MaskLookup tells which places one (b, h) sees; those of one tile come cheaper one after another.
class MaskLookup {
 public:
  ATTN_HD MaskLookup(const TileLists& lists, int batch, int head)
      : lists_(lists), batch_(batch), head_(head), row_tile_(-1), key_tile_(-1), entry_(0) {}

  // A tile's entry is the number of a bitmap, kAll or kNothing.
  static constexpr int64_t kAll = -1, kNothing = -2;
  ATTN_HD int64_t TileEntry(int row_tile, int key_tile) {
    if (lists_.lines == nullptr) return kAll;
    if (row_tile != row_tile_ || key_tile != key_tile_) Find(row_tile, key_tile);
    return entry_;
  }

  ATTN_HD bool Shows(int row, int key) {
    if (lists_.lines == nullptr) return true;
    const int row_tile = row / lists_.tile_rows, key_tile = key / lists_.tile_keys;
    if (TileEntry(row_tile, key_tile) < 0) return entry_ == kAll;
    row -= row_tile * lists_.tile_rows;
    key -= key_tile * lists_.tile_keys;
    const int x = lists_.by_keys ? key : row, y = lists_.by_keys ? row : key;
    const int in_x = x % kMaskSquare, in_y = y % kMaskSquare;
    const int64_t word = entry_ * BitmapWords(lists_.tile_rows, lists_.tile_keys) +
                         SquareOf(row, key, lists_.tile_keys) +
                         MaskWord::LaneOf(lists_.lanes, in_x, in_y);
    return ptx::LoadConstant32(lists_.bitmaps + word) >> MaskWord::BitOf(lists_.lanes, in_x, in_y) &
           1;
  }

 private:
  ATTN_HD void Find(int row_tile, int key_tile) {
    row_tile_ = row_tile;
    key_tile_ = key_tile;
    entry_ = kNothing;
    const MaskLine line = LineOf(lists_, batch_, head_, lists_.by_keys ? key_tile : row_tile);
    const int other = lists_.line_tiles == 1 ? 0 : lists_.by_keys ? row_tile : key_tile;
    const uint32_t at = FirstListed(lists_.tiles, line.begin, line.end, other);
    if (at == line.end) return;
    const uint32_t listed = ptx::LoadConstant32(lists_.tiles + at);
    if (static_cast<int>(listed & kListedTileMask) != other) return;
    const uint32_t number = listed >> kListedTileBits;
    entry_ = number == 0 ? kAll : int64_t{line.bitmap} + number - 1;
  }

  const TileLists& lists_;
  const int batch_, head_;
  int row_tile_, key_tile_;
  int64_t entry_;  // a bitmap, kAll or kNothing
};

}  // namespace attnd
