// Products of Q and K for captured attention maps (kernels/rules/capture_map.h) by m16n8k16 and, of
// float32, m16n8k8: slabs come by cp.async. Sums of float32 are added up slab by slab, as
// float_math.h asks. Errors: none.
#pragma once

#include "kernels/rules/capture_map.h"
#include "kernels/sm80/float_math.h"
#include "kernels/sm80/pipeline.h"

namespace attnd::sm80 {

template <class Math>
struct CaptureProducts {
  static constexpr bool kSplits = Math::kBytes == 4;
  static constexpr int kSquares = kSplits ? 1 : 2;
  static constexpr int kThreads = 256, kRowTiles = 2 * kSquares, kGroups = 4;

  struct Staging {};
  template <int kTileKeys>
  ATTN_HD static void Begin(const SlabRows& q, const SlabRows& k, int live_chunks, int thread,
                            char* sQ, char* sK, Staging&) {
    Copier<kCaptureRows>(q.data, q.row_bytes, q.rows, live_chunks, thread).Copy(0, sQ);
    Copier<kTileKeys>(k.data, k.row_bytes, k.rows, live_chunks, thread).Copy(0, sK);
    ptx::CommitCopies();
  }
  template <int kTileKeys>
  ATTN_HD static void End(int, char*, char*, const Staging&) {
    ptx::WaitForCopies<0>();
  }

  struct Scores {
    float tiles[kRowTiles][kGroups][4];
  };
  ATTN_HD static void Clear(Scores& rS) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kGroups * 4; ++n) {
      rS.tiles[n / (4 * kGroups)][n / 4 % kGroups][n & 3] = 0;
    }
  }
  // A unit is 16 rows and 32 keys.
  ATTN_HD static float& Score(Scores& rS, int unit, int pair, int element) {
    return rS.tiles[unit][pair & 3][2 * (pair >> 2) + element];
  }
  ATTN_HD static ScorePlace Place(int unit, int pair, int lane) {
    return {unit * kUnitRows + Accumulator::Row(2 * (pair >> 2), lane),
            (pair & 3) * 8 + Accumulator::Col(0, lane)};
  }

  ATTN_HD static void Multiply(const char* sQ, int first_row, const char* sK, int first_key,
                               int live_chunks, int lane, Scores& rS) {
    if constexpr (kSplits) {
      Scores part;
      Clear(part);
      AddProducts(sQ, first_row, sK, first_key, live_chunks, lane, part);
      Math::template Repair<kSlabChunks, kSlabChunks>(
          sQ, sK,
          [&](int m, int group, int e) {
            return typename Math::Rows{first_row + m * kUnitRows + Accumulator::Row(e, lane),
                                       first_key + group * 8 + Accumulator::Col(e, lane)};
          },
          part.tiles);
      Math::Fold(part.tiles, rS.tiles);
    } else {
      AddProducts(sQ, first_row, sK, first_key, live_chunks, lane, rS);
    }
  }

 private:
  template <int kRows>
  using Copier = RowCopier<kRows, kSlabChunks, kSlabChunks, kThreads>;

  ATTN_HD static void AddProducts(const char* sQ, int first_row, const char* sK, int first_key,
                                  int live_chunks, int lane, Scores& rS) {
    const LanePlace of_a = LanePlace::OfA(lane), of_b = LanePlace::OfColumns(lane);
    const int rows = ChunkOffset<kSlabChunks>(first_row + of_a.row, of_a.chunk);
    const int keys = ChunkOffset<kSlabChunks>(first_key + of_b.row, of_b.chunk);
#pragma unroll(kSplits ? 1 : kSlabChunks / 2)
    for (int c = 0; c < kSlabChunks; c += 2) {
      if (c >= live_chunks) break;
      uint32_t a[kRowTiles][Math::kOperandWords];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::ToOperand(ptx::LoadMatrices(At(sQ, Moved<kSlabChunks>(rows, m * kUnitRows, c))),
                        a[m]);
      }
#pragma unroll
      for (int x = 0; x < kGroups / 2; ++x) {
        const uint4 b = ptx::LoadMatrices(At(sK, Moved<kSlabChunks>(keys, x * 16, c)));
        Math::Multiply(rS.tiles, 2 * x, a, b);
      }
    }
  }
};

}  // namespace attnd::sm80
