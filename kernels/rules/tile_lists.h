// Reading a mask's lists (TileLists, params.h): lines, bitmaps, and single places for what is slow
// and rare. Host and device.
//
// Bitmaps stand as lanes hold scores, so that a lane's bits of 32×32 scores are one word. Squares
// of 32 rows × 32 keys follow one another along keys, then rows, 32 words each. x is along the rows
// of an accumulator: the mask's rows in forward, its keys in backward; y is the other side. With x
// and y counted inside the square, in the two orders (LaneOrder):
//   sm70  lane  x&1 | y&6 | (x>>2&1)<<3 | (x>>1&1)<<4        (sm70/tile_math.h)
//         bit   (y>>4&1)<<4 | (x>>4&1)<<3 | (y>>3&1)<<2 | (x>>3&1)<<1 | y&1
//   sm80  lane  (x&7)<<2 | y>>1&3                            (sm80/tile_math.h)
//         bit   x>>3<<3 | y>>3<<1 | y&1
// so each byte of a word is one accumulator of 16×16 scores, or eight of its rows' scores with 32
// columns. The lane_map_tests are the proof.
// Errors: none. Threads: pure functions.
#pragma once

#include "base/hd.h"
#include "kernels/ptx/instructions.h"
#include "kernels/rules/params.h"

namespace attnd {

inline constexpr int kMaskSquare = 32;

template <LaneOrder kOrder>
struct MaskWordOf;

template <>
struct MaskWordOf<kLanesOfSm70> {
  ATTN_HD static constexpr int LaneOf(int x, int y) {
    return (x & 1) | (y & 6) | (x >> 2 & 1) << 3 | (x >> 1 & 1) << 4;
  }
  ATTN_HD static constexpr int BitOf(int x, int y) {
    return (y >> 4 & 1) << 4 | (x >> 4 & 1) << 3 | (y >> 3 & 1) << 2 | (x >> 3 & 1) << 1 | (y & 1);
  }
  // The x of a lane's bit 0. Its y is lane & 6.
  ATTN_HD static constexpr int FirstX(int lane) {
    return (lane & 1) | (lane >> 4 & 1) << 1 | (lane >> 3 & 1) << 2;
  }

  // A lane's word of a square from its rows: row(n), n < 32, is 32 keys, the first in bit 0.
  template <class Row>
  ATTN_HD static uint32_t FromRows(int lane, const Row& row) {
    uint32_t word = 0;
    for (int n = 0; n < 4; ++n) {
      const int x = FirstX(lane) + n * 8;
      word |= Spread(row(x) >> (lane & 6), 3, 4, 16) << BitOf(x & ~7, 0);
    }
    return word;
  }
  // The same where rows are y.
  template <class Row>
  ATTN_HD static uint32_t FromColumns(int lane, const Row& row) {
    uint32_t word = 0;
    for (int n = 0; n < 8; ++n) {
      const int y = (n & 1) + (n >> 1) * 8;
      word |= Spread(row(y | (lane & 6)) >> FirstX(lane), 1, 2, 8) << BitOf(0, y);
    }
    return word;
  }
  // The 32 y of an x of a square: word(y) is that of LaneOf(x, y).
  template <class Word>
  ATTN_HD static uint32_t AlongY(int x, const Word& word) {
    uint32_t all = 0;
    for (int y = 0; y < 8; y += 2) {
      const uint32_t bits = word(y) >> BitOf(x, 0);
      all |= ((bits & 3) | (bits >> 4 & 3) << 8 | (bits >> 16 & 3) << 16 | (bits >> 20 & 3) << 24)
             << y;
    }
    return all;
  }

 private:
  // The `mask` of each byte: byte 1 goes to bit `one`, byte 2 to bit `two`, byte 3 to their sum.
  ATTN_HD static uint32_t Spread(uint32_t bytes, uint32_t mask, int one, int two) {
    return (bytes & mask) | (bytes >> 8 & mask) << one | (bytes >> 16 & mask) << two |
           (bytes >> 24 & mask) << (one + two);
  }
};

template <>
struct MaskWordOf<kLanesOfSm80> {
  ATTN_HD static constexpr int LaneOf(int x, int y) { return (x & 7) << 2 | (y >> 1 & 3); }
  ATTN_HD static constexpr int BitOf(int x, int y) {
    return (x >> 3 & 3) << 3 | (y >> 3 & 3) << 1 | (y & 1);
  }
  template <class Word>
  ATTN_HD static uint32_t AlongY(int x, const Word& word) {
    uint32_t all = 0;
    for (int y = 0; y < 8; y += 2) {
      const uint32_t bits = word(y) >> BitOf(x, 0);
      all |= ((bits & 3) | (bits >> 2 & 3) << 8 | (bits >> 4 & 3) << 16 | (bits >> 6 & 3) << 24)
             << y;
    }
    return all;
  }
  template <class Row>
  ATTN_HD static uint32_t FromRows(int lane, const Row& row) {
    uint32_t word = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t pairs = row((lane >> 2) + n * 8) >> (lane & 3) * 2 & 0x03030303u;
      word |= ((pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 0xffu) << n * 8;
    }
    return word;
  }
  template <class Row>
  ATTN_HD static uint32_t FromColumns(int lane, const Row& row) {
    uint32_t word = 0;
    for (int n = 0; n < 8; ++n) {
      const int y = (n & 1) + (lane & 3) * 2 + (n >> 1) * 8;
      word |= (row(y) >> (lane >> 2) & 0x01010101u) << n;
    }
    return word;
  }
};

struct MaskWord {
  template <class Row>
  ATTN_HD static uint32_t FromRows(LaneOrder order, int lane, const Row& row) {
    return order == kLanesOfSm80 ? MaskWordOf<kLanesOfSm80>::FromRows(lane, row)
                                 : MaskWordOf<kLanesOfSm70>::FromRows(lane, row);
  }
  template <class Row>
  ATTN_HD static uint32_t FromColumns(LaneOrder order, int lane, const Row& row) {
    return order == kLanesOfSm80 ? MaskWordOf<kLanesOfSm80>::FromColumns(lane, row)
                                 : MaskWordOf<kLanesOfSm70>::FromColumns(lane, row);
  }
  template <class Word>
  ATTN_HD static uint32_t AlongY(LaneOrder order, int x, const Word& word) {
    return order == kLanesOfSm80 ? MaskWordOf<kLanesOfSm80>::AlongY(x, word)
                                 : MaskWordOf<kLanesOfSm70>::AlongY(x, word);
  }
  ATTN_HD static int LaneOf(LaneOrder order, int x, int y) {
    return order == kLanesOfSm80 ? MaskWordOf<kLanesOfSm80>::LaneOf(x, y)
                                 : MaskWordOf<kLanesOfSm70>::LaneOf(x, y);
  }
  ATTN_HD static int BitOf(LaneOrder order, int x, int y) {
    return order == kLanesOfSm80 ? MaskWordOf<kLanesOfSm80>::BitOf(x, y)
                                 : MaskWordOf<kLanesOfSm70>::BitOf(x, y);
  }
};

ATTN_HD constexpr int BitmapWords(int tile_rows, int tile_keys) {
  return tile_rows * tile_keys / 32;
}
// The first word of the square that holds a place of a tile.
ATTN_HD constexpr int SquareOf(int row, int key, int tile_keys) {
  return (row / kMaskSquare * (tile_keys / kMaskSquare) + key / kMaskSquare) * 32;
}

// The line of own tile `tile` for (b, h), whose tiles may be empty. Needs lists.
ATTN_HD MaskLine LineOf(const TileLists& lists, int batch, int head, int tile) {
  int64_t plan = batch * lists.batch + head * lists.head;
  if (lists.plan_of != nullptr) plan = ptx::LoadConstant32(lists.plan_of + plan);
  const int line = lists.plan_lines == 1 ? 0 : tile;
  const uint4 words = ptx::LoadConstant128(lists.lines + plan * lists.plan_lines + line);
  return {words.x, words.y, words.z, 0};
}
// The n-th run of a line, n from 1 on.
ATTN_HD MaskLine RunOf(const MaskLine& line, int n) {
  const uint32_t tiles = line.end - line.begin;
  const uint32_t begin = tiles * static_cast<uint32_t>(n - 1) / kListRuns;
  const uint32_t end = tiles * static_cast<uint32_t>(n) / kListRuns;
  return {line.begin + begin, line.begin + end, line.bitmap, 0};
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

// Which of 64 rows or fewer a bitmap shows `key` of its tile, lists by keys: bit n is row n.
ATTN_HD uint64_t RowsOfKey(const uint32_t* bitmap, int key, const TileLists& lists) {
  uint64_t rows = 0;
  for (int row = 0; row < lists.tile_rows; row += kMaskSquare) {
    const uint32_t* square = bitmap + SquareOf(row, key, lists.tile_keys);
    const auto word = [&](int y) {
      return ptx::LoadConstant32(square + MaskWord::LaneOf(lists.lanes, key, y));
    };
    rows |= uint64_t{MaskWord::AlongY(lists.lanes, key, word)} << row;
  }
  return rows;
}
// Whether some row of [begin, end) of (b, h) sees `key`; lists by keys. Stops at the first.
ATTN_HD bool IsShown(const TileLists& lists, int batch, int head, int key, int begin, int end) {
  if (begin >= end) return false;
  const int size = lists.tile_rows;
  const MaskLine line = LineOf(lists, batch, head, key / lists.tile_keys);
  const bool holds_for_all = lists.line_tiles == 1;
  uint32_t at =
      holds_for_all ? line.begin : FirstListed(lists.tiles, line.begin, line.end, begin / size);
  for (; at < line.end; ++at) {
    const uint32_t listed = ptx::LoadConstant32(lists.tiles + at);
    const int tile = holds_for_all ? begin / size : static_cast<int>(listed & kListedTileMask);
    const int first = tile * size;
    if (first >= end) return false;
    const uint32_t number = listed >> kListedTileBits;
    if (number == 0) return true;
    const uint32_t* bitmap =
        lists.bitmaps + (int64_t{line.bitmap} + number - 1) * BitmapWords(size, lists.tile_keys);
    const uint64_t rows = RowsOfKey(bitmap, key % lists.tile_keys, lists);
    const uint64_t from = begin > first ? ~uint64_t{0} << (begin - first) : ~uint64_t{0};
    const uint64_t up_to = end - first < 64 ? ~(~uint64_t{0} << (end - first)) : ~uint64_t{0};
    if (rows & from & up_to) return true;
  }
  return false;
}

// What one (b, h) sees, place by place; those of one tile come cheaper one after another.
class MaskLookup {
 public:
  ATTN_HD MaskLookup(const TileLists& lists, int batch, int head)
      : lists_(lists), batch_(batch), head_(head), row_tile_(-1), key_tile_(-1), entry_(0) {}

  // What the mask shows of a tile: the number of a bitmap, kAll or kNothing.
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
