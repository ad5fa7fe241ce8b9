// ProductKernel: C = A·B by mma.m16n8k16 (kernels/dense/product_params.h), float16 or bfloat16
// numbers with float32 sums. Each of four warps owns a quarter of kTile × kTile numbers of C, in
// tiles of 16 × 8; steps of A and B come by cp.async, kStages deep, and leave by ldmatrix. A lone
// block of small tiles waits for memory more than it multiplies, so it asks for more ahead.
// Errors: none.
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm80/pipeline.h"

namespace attnd::sm80 {

// Lane l's part of a product's operand from a stage: `row` rows (columns) of C and `depth` on from
// the warp's first.
template <int kTile, bool kByDepth, bool kIsB>
struct OperandLoader {
  using Layout = OperandLayout<kTile, kByDepth>;
  // ldmatrix transposes what lies by depth.
  ATTN_HD static uint4 Load(const char* stage, int first, int depth, int lane) {
    const LanePlace place = kByDepth == kIsB ? LanePlace::OfA(lane) : LanePlace::OfColumns(lane);
    if constexpr (kByDepth) {
      return ptx::LoadMatricesTransposed(
          stage + Layout::Offset(depth + place.row, first / kProductChunk + place.chunk));
    } else {
      return ptx::LoadMatrices(
          stage + Layout::Offset(first + place.row, depth / kProductChunk + place.chunk));
    }
  }
};

template <class Math, int kTile, bool kAByDepth, bool kBByDepth>
struct ProductKernel {
  static constexpr int kThreads = kProductThreads, kStages = kTile == kProductTile ? 3 : 5;
  struct Stage {
    alignas(128) char a[kOperandBytes<kTile>];
    alignas(128) char b[kOperandBytes<kTile>];
  };
  union Shared {
    Stage stages[kStages];
    ProductRows<kTile, 8> rows[kThreads / 32];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const ProductDesc& p = *static_cast<const ProductDesc*>(params.dense);
    const ProductPart part = ProductPartOf<kTile>(p, at.block);
    const ProductPlace place = ProductPlaceOf<kTile>(p, part.tile);
    Sums sums;
    Zero(sums);
    Multiply(p, place, part, at.thread, shared, sums);
    WaitForTurn(p, part, at.thread);
    Store(p, place, at.thread, shared, sums);
    PassTurn(p, part, at.thread);
  }

 private:
  static constexpr int kWarpTile = kTile / 2, kTiles = kWarpTile / 16, kGroups = kWarpTile / 8;
  using Sums = float[kTiles][kGroups][4];
  using A = OperandLoader<kTile, kAByDepth, false>;
  using B = OperandLoader<kTile, kBByDepth, true>;

  ATTN_HD static void Zero(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] = 0;
      }
    }
  }
  ATTN_HD static int WarpRow(int thread) { return (thread >> 6) * kWarpTile; }
  ATTN_HD static int WarpColumn(int thread) { return (thread >> 5 & 1) * kWarpTile; }

  // The next step of an operand, of whose depth `left` are left: zeros beyond.
  template <bool kByDepth>
  ATTN_HD static void Copy(OperandChunks<kTile, kByDepth>& chunks, char* stage, int left) {
#pragma unroll
    for (int n = 0; n < kOperandPasses<kTile>; ++n) {
      ptx::CopyAsync(stage + chunks.Place(n), chunks.Pass(n),
                     chunks.Exists(n) && chunks.IsWithin(n, left));
    }
    chunks.Advance();
  }

  ATTN_HD static void Multiply(const ProductDesc& p, const ProductPlace& place,
                               const ProductPart& part, int thread, Shared& shared, Sums& sums) {
    const int begin = part.begin, depth = part.depth;
    OperandChunks<kTile, kAByDepth> a(p.a, p.a_stride, place.row, p.rows, begin, thread);
    OperandChunks<kTile, kBByDepth> b(p.b, p.b_stride, place.column, p.columns, begin, thread);
    int to_come = depth;
    const auto bring = [&](Stage& stage) {
      if (to_come > 0) {
        Copy(a, stage.a, to_come);
        Copy(b, stage.b, to_come);
      }
      to_come -= kProductStep;
      ptx::CommitCopies();
    };
#pragma unroll
    for (int n = 0; n < kStages - 1; ++n) bring(shared.stages[n]);
    int stage = 0, next = kStages - 1;
#pragma unroll 1
    for (int left = depth; left > 0; left -= kProductStep) {
      ptx::WaitForCopies<kStages - 2>();
      ptx::SyncThreads();
      bring(shared.stages[next]);
      AddStep(shared.stages[stage], thread, sums);
      stage = stage == kStages - 1 ? 0 : stage + 1;
      next = next == kStages - 1 ? 0 : next + 1;
    }
    ptx::WaitForCopies<0>();
    ptx::SyncThreads();
  }

  ATTN_HD static void AddStep(const Stage& stage, int thread, Sums& sums) {
    const int lane = thread & 31;
#pragma unroll
    for (int depth = 0; depth < kProductStep; depth += 16) {
      uint4 b[kGroups / 2];
#pragma unroll
      for (int n = 0; n < kGroups / 2; ++n) {
        b[n] = B::Load(stage.b, WarpColumn(thread) + 16 * n, depth, lane);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t a[4];
        ToWords(A::Load(stage.a, WarpRow(thread) + 16 * m, depth, lane), a);
#pragma unroll
        for (int n = 0; n < kGroups / 2; ++n) {
          Math::Multiply(sums[m][2 * n], a, b[n].x, b[n].y);
          Math::Multiply(sums[m][2 * n + 1], a, b[n].z, b[n].w);
        }
      }
    }
  }

  struct Rows {
    ATTN_HD static int RowOf(int group, int n) { return 16 * group + n; }
  };
  // Sixteen rows at a time; each warp through memory of its own.
  ATTN_HD static void Store(const ProductDesc& p, const ProductPlace& place, int thread,
                            Shared& shared, const Sums& sums) {
    auto& rows = shared.rows[thread >> 5];
    const int lane = thread & 31;
    const ProductPlace own = {place.row + WarpRow(thread), place.column + WarpColumn(thread)};
    const ProductOutput<kTile> output(p, own, thread & 31);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          ptx::StoreShared64(
              &rows.sums[Accumulator::Row(e, lane)][8 * n + Accumulator::Col(e, lane)],
              make_uint2(ptx::FloatBits(sums[m][n][e]), ptx::FloatBits(sums[m][n][e + 1])));
        }
      }
      output.template Store<Rows>(m, rows);
    }
  }
};

}  // namespace attnd::sm80
