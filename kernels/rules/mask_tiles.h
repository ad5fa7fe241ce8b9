// A bool mask's lists and bitmaps (TileLists, kernels/rules/params.h) from its bits: a small kernel
// ahead of forward and of backward, each for its own tiles; it reads the mask twice, the second
// time mostly from caches. Each partial tile has a bitmap of its own, at its number in its line's
// room. Any architecture. Errors: none.
#pragma once

#include "kernels/rules/tile_lists.h"

namespace attnd {

// One block of 256 threads for one line of one (batch entry, head): TileWork.tile is the line.
// 32 tiles at a time, one a lane; the warps share their rows.
struct MaskTilesKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  struct Shared {
    uint32_t visible[kWarps][32], hidden[kWarps][32];  // whether any, of a warp's rows
    uint32_t partial;                                  // those of the 32 tiles at hand
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork& work = params.tiles[at.block];
    const ProblemDesc& p = params.problems[work.problem];
    const TileLists& lists = p.tile_lists;
    const int64_t plan = work.batch * lists.batch + work.head * lists.head;
    const int64_t line = plan * lists.plan_lines + work.tile;
    const Bits bits = {
        p,
        static_cast<const char*>(p.mask.data) + work.batch * p.mask.batch + work.head * p.mask.head,
        work.tile};
    const uint32_t begin = static_cast<uint32_t>(line * lists.line_tiles);
    const int warp = at.thread >> 5, lane = at.thread & 31;
    int listed = 0;
    for (int first = 0; first < lists.line_tiles; first += 32) {
      const int tile = first + lane;
      const Seen seen = tile < lists.line_tiles ? Look(bits, tile, warp) : Seen{0, 0};
      ptx::StoreShared32(&shared.visible[warp][lane], seen.visible);
      ptx::StoreShared32(&shared.hidden[warp][lane], seen.hidden);
      ptx::SyncThreads();
      if (warp == 0) listed = Append(shared, tile, lane, listed, lists.tiles + begin);
      ptx::SyncThreads();
      MakeBitmaps(bits, first, ptx::LoadShared32(&shared.partial), begin, at.thread);
    }
    if (at.thread != 0) return;
    ptx::StoreGlobal128(lists.lines + line,
                        make_uint4(begin, begin + static_cast<uint32_t>(listed), begin, 0));
  }

 private:
  struct Seen {
    uint32_t visible, hidden;
  };

  // The mask's bits, as tiles of one line ask for them.
  struct Bits {
    const ProblemDesc& problem;
    const char* data;
    int line;
    ATTN_HD int first_row(int tile) const {
      const TileLists& lists = problem.tile_lists;
      return (lists.by_keys ? tile : line) * lists.tile_rows;
    }
    ATTN_HD int first_key(int tile) const {
      const TileLists& lists = problem.tile_lists;
      return (lists.by_keys ? line : tile) * lists.tile_keys;
    }
    // Tells for which of 32 keys, the first a multiple of 32, the mask has a bit. One column is for
    // all.
    ATTN_HD uint32_t Existing(int key) const {
      const int left = problem.mask.columns - key;
      if (left >= 32 || problem.mask.columns == 1) return ~0u;
      return left <= 0 ? 0 : (1u << left) - 1;
    }
    // Their bits; 0 beyond the mask.
    ATTN_HD uint32_t Keys(int row, int key) const {
      const MaskBits& mask = problem.mask;
      if (mask.rows == 1) row = 0;
      if (row >= mask.rows) return 0;
      const char* from = data + row * mask.row;
      if (mask.columns == 1) return ptx::LoadConstant8(from) & 1 ? ~0u : 0u;
      return Word(from, key >> 3, (mask.columns + 7) >> 3) & Existing(key);
    }
    // 32 bits of a row, from a byte on that is a multiple of four.
    ATTN_HD static uint32_t Word(const char* bits, int byte, int row_bytes) {
      if (row_bytes % 4 == 0 && byte < row_bytes) return ptx::LoadConstant32(bits + byte);
      uint32_t word = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (byte + n < row_bytes) word |= ptx::LoadConstant8(bits + byte + n) << (8 * n);
      }
      return word;
    }
  };

  // Looks at this warp's rows of a tile.
  ATTN_HD static Seen Look(const Bits& bits, int tile, int warp) {
    const TileLists& lists = bits.problem.tile_lists;
    const int row_begin = bits.first_row(tile), key_begin = bits.first_key(tile);
    const int rows = bits.problem.mask.rows;
    const int row_end = rows == 1 ? row_begin + 1 : Smaller(row_begin + lists.tile_rows, rows);
    Seen seen = {0, 0};
    for (int row = row_begin + warp; row < row_end; row += kWarps) {
      for (int key = key_begin; key < key_begin + lists.tile_keys; key += 32) {
        const uint32_t keys = bits.Keys(row, key);
        seen.visible |= keys;
        seen.hidden |= ~keys & bits.Existing(key);
      }
    }
    return seen;
  }

  // 32 tiles into the line's list, of which `listed` stand there. Returns how many then do.
  ATTN_HD static int Append(Shared& shared, int tile, int lane, int listed, uint32_t* list) {
    uint32_t visible = 0, hidden = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      visible |= ptx::LoadShared32(&shared.visible[n][lane]);
      hidden |= ptx::LoadShared32(&shared.hidden[n][lane]);
    }
    const uint32_t chosen = ptx::Ballot(visible != 0);
    const uint32_t partial = ptx::Ballot(visible != 0 && hidden != 0);
    if (lane == 0) ptx::StoreShared32(&shared.partial, partial);
    const int before = listed + ptx::CountBits(chosen & ((1u << lane) - 1));
    if (visible != 0) {
      const uint32_t number = hidden != 0 ? static_cast<uint32_t>(tile) + 1 : 0;
      ptx::StoreGlobal32(list + before, static_cast<uint32_t>(tile) | number << kListedTileBits);
    }
    return listed + ptx::CountBits(chosen);
  }

  // Makes the bitmaps of the partial tiles among the 32 from `first` on; `bitmap` is the line's
  // first.
  ATTN_HD static void MakeBitmaps(const Bits& bits, int first, uint32_t partial, uint32_t bitmap,
                                  int thread) {
    const TileLists& lists = bits.problem.tile_lists;
    const int words = BitmapWords(lists.tile_rows, lists.tile_keys);
    const int squares = lists.tile_keys / kMaskSquare;  // along keys
    for (int n = thread; n < 32 * words; n += kThreads) {
      const int tile = first + n / words, word = n % words;
      if (!(partial >> (tile - first) & 1)) continue;
      const int square = word / 32, lane = word % 32;
      const int row = bits.first_row(tile) + square / squares * kMaskSquare;
      const int key = bits.first_key(tile) + square % squares * kMaskSquare;
      const auto keys_of = [&](int y) { return bits.Keys(row + y, key); };
      ptx::StoreGlobal32(lists.bitmaps + (int64_t{bitmap} + tile) * words + word,
                         lists.by_keys ? MaskWord::FromColumns(lists.lanes, lane, keys_of)
                                       : MaskWord::FromRows(lists.lanes, lane, keys_of));
    }
  }
  ATTN_HD static int Smaller(int a, int b) { return a < b ? a : b; }
};

}  // namespace attnd
