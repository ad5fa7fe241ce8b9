// Products of Q and K for captured attention maps (kernels/rules/capture_map.h) by m8n8k4: slabs go
// through registers, operands come from shared memory for both. Errors: none.
#pragma once

#include "kernels/rules/capture_map.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

struct CaptureProducts {
  static constexpr int kSquares = 2;
  static constexpr int kThreads = 256, kPassRows = kThreads / kSlabChunks;  // of a slab
  static constexpr int kPasses = kCaptureRows / kPassRows;
  using Math = Float32Accumulate;

  struct Staging {
    uint4 q[kPasses], k[kPasses];
  };
  template <int kTileKeys>
  ATTN_HD static void Begin(const SlabRows& q, const SlabRows& k, int live_chunks, int thread,
                            char* /*sQ*/, char* /*sK*/, Staging& held) {
    static_assert(kTileKeys == kCaptureRows);
    Fetch(q, live_chunks, thread, held.q);
    Fetch(k, live_chunks, thread, held.k);
  }
  template <int kTileKeys>
  ATTN_HD static void End(int thread, char* sQ, char* sK, const Staging& held) {
    const int place = ChunkOffset(thread / kSlabChunks, thread % kSlabChunks, kSlabChunks);
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      ptx::StoreShared128(sQ + place + n * kPassRows * kSlabBytes, held.q[n]);
      ptx::StoreShared128(sK + place + n * kPassRows * kSlabBytes, held.k[n]);
    }
  }

  // [row tile][group of 16 keys].
  struct Scores {
    Math::Accumulator tiles[2 * kSquares][2];
  };
  ATTN_HD static void Clear(Scores& rS) {
#pragma unroll
    for (int n = 0; n < 4 * kSquares; ++n) Math::Zero(rS.tiles[n >> 1][n & 1]);
  }
  // A unit is 32 rows and a group of 16 keys.
  ATTN_HD static float& Score(Scores& rS, int unit, int pair, int element) {
    return rS.tiles[(unit & ~1) + (pair >> 2)][unit & 1][PairElement(pair & 3) + element];
  }
  ATTN_HD static ScorePlace Place(int unit, int pair, int lane) {
    return {(pair >> 2) * 16 + Math::Row(PairElement(pair & 3), lane),
            unit * 16 + Math::Col(PairElement(pair & 3), lane)};
  }

  ATTN_HD static void Multiply(const char* sQ, int first_row, const char* sK, int first_key,
                               int live_chunks, int lane, Scores& rS) {
    const Lane own = {lane};
    const int rows = ChunkOffset(first_row + own.OperandRow(), 0, kSlabChunks);
    const int keys = ChunkOffset(first_key + own.OperandKey(), 0, kSlabChunks);
#pragma unroll 1
    for (int half = 0; half < 2 && half * (kSlabChunks / 2) < live_chunks; ++half) {
      MultiplyHalf(sQ, rows ^ half * (kSlabBytes / 2), sK, keys ^ half * (kSlabBytes / 2), rS);
    }
  }

 private:
  ATTN_HD static constexpr int PairElement(int n) { return Math::Element(n % 2, n / 2 * 2); }

  ATTN_HD static void Fetch(const SlabRows& rows, int live_chunks, int thread,
                            uint4 (&held)[kPasses]) {
    const int row = thread / kSlabChunks, chunk = thread % kSlabChunks;
    const char* from = ptx::Offset(rows.data + chunk * 16, row, rows.row_bytes);
    const int left = chunk < live_chunks ? rows.rows - row : 0;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      held[n] = make_uint4(0, 0, 0, 0);
      ptx::LoadConstant128If(held[n], ptx::Offset(from, n * kPassRows, rows.row_bytes),
                             n * kPassRows < left);
    }
  }
  // Four chunks, 32 columns. Rows are whole lines, so another chunk is other bits of the offset.
  ATTN_HD static void MultiplyHalf(const char* sQ, int rows, const char* sK, int keys, Scores& rS) {
#pragma unroll
    for (int chunk = 0; chunk < kSlabChunks / 2; ++chunk) {
      uint4 a[2 * kSquares], b[2];
#pragma unroll
      for (int m = 0; m < 2 * kSquares; ++m) {
        a[m] = ptx::LoadShared128(sQ + (rows ^ chunk * 16) + m * 16 * kSlabBytes);
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        b[g] = ptx::LoadShared128(sK + (keys ^ chunk * 16) + g * 16 * kSlabBytes);
      }
#pragma unroll
      for (int n = 0; n < 4 * kSquares; ++n) {
        Math::Multiply(rS.tiles[n >> 1][n & 1], a[n >> 1].x, a[n >> 1].y, b[n & 1].x, b[n & 1].y);
      }
#pragma unroll
      for (int n = 0; n < 4 * kSquares; ++n) {
        Math::Multiply(rS.tiles[n >> 1][n & 1], a[n >> 1].z, a[n >> 1].w, b[n & 1].z, b[n & 1].w);
      }
    }
  }
};

}  // namespace attnd::sm70
