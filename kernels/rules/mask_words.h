// Bitmaps of a mask's lists (TileLists, params.h): which lane holds which place. Host and device.
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
// The n-th run of a line, n from 1 on.
ATTN_HD MaskLine RunOf(const MaskLine& line, int n) {
  const uint32_t tiles = line.end - line.begin;
  const uint32_t begin = tiles * static_cast<uint32_t>(n - 1) / kListRuns;
  const uint32_t end = tiles * static_cast<uint32_t>(n) / kListRuns;
  return {line.begin + begin, line.begin + end, line.bitmap, 0};
}

}  // namespace attnd
