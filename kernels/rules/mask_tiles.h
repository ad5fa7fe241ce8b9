// Which tiles of a bool mask hold a visible score: what TileLists (kernels/rules/params.h) says,
// from the mask's bits. A small kernel ahead of forward and of backward, each for its own tiles; it
// reads the mask once. Any architecture. Errors: none.
#pragma once

#include "kernels/ptx/instructions.h"
#include "kernels/rules/params.h"

namespace attnd {

// One block of 256 threads for one line of one (batch entry, head): TileWork.tile is the line.
// Backward's lines (`kByKeys`) are tiles of keys, forward's are tiles of rows. 32 tiles at a time,
// one a lane; the warps share their rows.
template <bool kByKeys>
struct MaskTilesKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  struct Shared {
    uint32_t visible[kWarps][32], hidden[kWarps][32];  // whether any, of a warp's rows
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork& work = params.tiles[at.block];
    const ProblemDesc& p = params.problems[work.problem];
    const TileLists& lists = p.tile_lists;
    const char* mask =
        static_cast<const char*>(p.mask.data) + work.batch * p.mask.batch + work.head * p.mask.head;
    uint16_t* rank =
        lists.data + work.batch * lists.batch + work.head * lists.head + work.tile * lists.line;
    const int warp = at.thread >> 5, lane = at.thread & 31;
    int listed = 0;
    for (int first = 0; first < lists.tiles; first += 32) {
      const int tile = first + lane;
      const Seen seen = tile < lists.tiles ? Look(p, mask, work.tile, tile, warp) : Seen{0, 0};
      ptx::StoreShared32(&shared.visible[warp][lane], seen.visible);
      ptx::StoreShared32(&shared.hidden[warp][lane], seen.hidden);
      ptx::SyncThreads();
      if (warp == 0) listed = Append(shared, lists.tiles, tile, lane, listed, rank);
      ptx::SyncThreads();
    }
    if (at.thread == 0) ptx::StoreGlobal16(rank + lists.tiles, static_cast<uint32_t>(listed));
  }

 private:
  struct Seen {
    uint32_t visible, hidden;
  };

  // What this warp's rows of a tile hold.
  ATTN_HD static Seen Look(const ProblemDesc& p, const char* mask, int line, int tile, int warp) {
    const TileLists& lists = p.tile_lists;
    const int row_tile = kByKeys ? tile : line, key_tile = kByKeys ? line : tile;
    const int row_begin = row_tile * lists.tile_rows, key_begin = key_tile * lists.tile_keys;
    const int row_end = Smaller(row_begin + lists.tile_rows, lists.mask_rows);
    const int key_end = Smaller(key_begin + lists.tile_keys, lists.mask_columns);
    const int row_bytes = (lists.mask_columns + 7) >> 3;
    Seen seen = {0, 0};
    for (int row = row_begin + warp; row < row_end; row += kWarps) {
      const char* bits = mask + row * p.mask.row;
      for (int key = key_begin; key < key_end; key += 32) {
        const uint32_t word = Word(bits, key >> 3, row_bytes);
        const uint32_t exist = key_end - key >= 32 ? ~0u : (1u << (key_end - key)) - 1;
        seen.visible |= word & exist;
        seen.hidden |= ~word & exist;
      }
    }
    return seen;
  }
  // 32 bits of a row, from a byte on that is a multiple of four.
  ATTN_HD static uint32_t Word(const char* bits, int byte, int row_bytes) {
    if (row_bytes % 4 == 0) return ptx::LoadConstant32(bits + byte);
    uint32_t word = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (byte + n < row_bytes) word |= ptx::LoadConstant8(bits + byte + n) << (8 * n);
    }
    return word;
  }

  // 32 tiles into the line's numbers, of which `listed` are listed. Returns how many are then.
  ATTN_HD static int Append(const Shared& shared, int tiles, int tile, int lane, int listed,
                            uint16_t* rank) {
    uint32_t visible = 0, hidden = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      visible |= ptx::LoadShared32(&shared.visible[n][lane]);
      hidden |= ptx::LoadShared32(&shared.hidden[n][lane]);
    }
    const uint32_t chosen = ptx::Ballot(visible != 0);
    const int before = listed + ptx::CountBits(chosen & ((1u << lane) - 1));
    if (tile < tiles) ptx::StoreGlobal16(rank + tile, static_cast<uint32_t>(before));
    if (visible != 0) {
      const uint32_t tag = hidden != 0 ? kTilePartial : 0u;
      ptx::StoreGlobal16(rank + tiles + 1 + before, static_cast<uint32_t>(tile) | tag);
    }
    return listed + ptx::CountBits(chosen);
  }
  ATTN_HD static int Smaller(int a, int b) { return a < b ? a : b; }
};

}  // namespace attnd
