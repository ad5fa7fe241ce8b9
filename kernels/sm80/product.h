// ProductKernel: C = A·B by mma.m16n8k16 of float16 or bfloat16 numbers with float32 sums, or by
// mma.m16n8k8 of float32 ones as three products (kernels/dense/product_params.h, float_math.h).
// Each of four warps owns a quarter of kTile × kTile numbers of C, in tiles of 16 × 8; steps of A
// and B come by cp.async, kStages deep, and leave by ldmatrix, or by numbers where float32 lie by
// depth. A lone block of small tiles waits for memory more than it multiplies, so it asks for more
// ahead.
//
// float32   a tensor core adds up eight of the depth, which are then added to the sums: it
//           truncates. An infinity or NaN among the sums makes the block do all again in a way that
//           gives them their right places, and other numbers the same bits.
// Errors: none.
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm80/pipeline.h"

namespace attnd::sm80 {

// A lane's part of an operand from a stage: 16 rows (columns) of C at a time, `n` times as many on
// from the warp's first, and 32 bytes of the depth. Chunks' numbers have no bit in common with what
// moves them.
template <int kTile, int kBytes, bool kByDepth, bool kIsB>
class OperandLoader {
 public:
  ATTN_HD OperandLoader(int first, int lane) {
    const LanePlace place = kByDepth == kIsB ? LanePlace::OfA(lane) : LanePlace::OfColumns(lane);
    if constexpr (!kByDepth) {
      begin_ = Layout::Offset(first + place.row, place.chunk);
    } else if constexpr (kBytes == 2) {
      begin_ = Layout::Offset(place.row, first / kChunk + place.chunk);
    } else {
      begin_ = Layout::Offset(lane & 3, first / kChunk + (lane >> 4)) + (lane >> 2 & 3) * 4;
    }
  }
  // ldmatrix transposes what lies by depth, if it has 16 bits.
  ATTN_HD uint4 Load(const char* stage, int n, int depth) const {
    if constexpr (!kByDepth) {
      return ptx::LoadMatrices(stage + (begin_ ^ depth / kChunk * 16) + n * (16 * 64));
    } else if constexpr (kBytes == 2) {
      return ptx::LoadMatricesTransposed(stage + (begin_ ^ n * 32) + depth * kLine);
    } else {
      const auto number = [&](int row, int from) {
        return ptx::LoadShared32(stage + (begin_ ^ (n * 64 + row * 4)) + (depth + from) * kLine);
      };
      return make_uint4(number(0, 0), number(kIsB ? 0 : 8, kIsB ? 4 : 0),
                        number(kIsB ? 8 : 0, kIsB ? 0 : 4), number(8, 4));
    }
  }

 private:
  using Layout = OperandLayout<kTile, kBytes, kByDepth>;
  static constexpr int kChunk = 16 / kBytes, kLine = Layout::kChunks * 16;
  int begin_;
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
    ProductRows<kTile> rows[kThreads / 32];
    uint32_t not_finite[kThreads / 32];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const ProductDesc& p = *static_cast<const ProductDesc*>(params.dense);
    const ProductPart part = ProductPartOf<kTile>(p, at.block);
    const ProductPlace place = ProductPlaceOf<kTile>(p, part.tile);
    Sums sums;
    Multiply<false>(p, place, part, at.thread, shared, sums);
    if constexpr (kIsFloat) {
      if (!AreFinite(sums, at.thread, shared)) {
        Multiply<true>(p, place, part, at.thread, shared, sums);
      }
    }
    WaitForTurn(p, part, at.thread);
    Store(p, place, at.thread, shared, sums);
    PassTurn(p, part, at.thread);
  }

 private:
  static constexpr int kWarpTile = kTile / 2, kTiles = kWarpTile / 16, kGroups = kWarpTile / 8;
  static constexpr int kBytes = Math::kBytes, kStep = kProductStep<kBytes>;
  static constexpr bool kIsFloat = kBytes == 4;
  // Parts of a step. Of a large one of float32 two would spill.
  static constexpr int kTogether = kIsFloat && kTile == kProductTile ? 1 : 2;
  using Sums = float[kTiles][kGroups][4];
  using A = OperandLoader<kTile, kBytes, kAByDepth, false>;
  using B = OperandLoader<kTile, kBytes, kBByDepth, true>;

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
  ATTN_HD static void Copy(OperandChunks<kTile, kBytes, kByDepth>& chunks, char* stage, int left) {
#pragma unroll
    for (int n = 0; n < kOperandPasses<kTile>; ++n) {
      ptx::CopyAsync(stage + chunks.Place(n), chunks.Pass(n), chunks.IsWithin(n, left));
    }
    chunks.Advance();
  }

  // `kAny` says that float32 numbers may be infinite or NaN.
  template <bool kAny>
  ATTN_HD static void Multiply(const ProductDesc& p, const ProductPlace& place,
                               const ProductPart& part, int thread, Shared& shared, Sums& sums) {
    Zero(sums);
    const int begin = part.begin, depth = part.depth;
    OperandChunks<kTile, kBytes, kAByDepth> a(p.a, p.a_stride, place.row, p.rows, begin, thread);
    OperandChunks<kTile, kBytes, kBByDepth> b(p.b, p.b_stride, place.column, p.columns, begin,
                                              thread);
    const A a_loader(WarpRow(thread), thread & 31);
    const B b_loader(WarpColumn(thread), thread & 31);
    int to_come = depth;
    const auto bring = [&](Stage& stage) {
      if (to_come > 0) {
        Copy(a, stage.a, to_come);
        Copy(b, stage.b, to_come);
      }
      to_come -= kStep;
      ptx::CommitCopies();
    };
#pragma unroll
    for (int n = 0; n < kStages - 1; ++n) bring(shared.stages[n]);
    int stage = 0, next = kStages - 1;
#pragma unroll 1
    for (int left = depth; left > 0; left -= kStep) {
      ptx::WaitForCopies<kStages - 2>();
      ptx::SyncThreads();
      bring(shared.stages[next]);
      AddStep<kAny>(shared.stages[stage], a_loader, b_loader, sums);
      stage = stage == kStages - 1 ? 0 : stage + 1;
      next = next == kStages - 1 ? 0 : next + 1;
    }
    ptx::WaitForCopies<0>();
    ptx::SyncThreads();
  }

  template <bool kAny>
  ATTN_HD static void AddStep(const Stage& stage, const A& a_loader, const B& b_loader,
                              Sums& sums) {
#pragma unroll kTogether
    for (int depth = 0; depth < kStep; depth += 32 / kBytes) {
      if constexpr (kAny) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kGroups; n += 2) {
            Math::AddAny(sums[m], n, a_loader.Load(stage.a, m, depth),
                         b_loader.Load(stage.b, n / 2, depth));
          }
        }
        continue;
      }
      uint32_t a[kTiles][Math::kOperandWords];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) Math::ToOperand(a_loader.Load(stage.a, m, depth), a[m]);
#pragma unroll
      for (int n = 0; n < kGroups; n += 2) {
        const uint4 b = b_loader.Load(stage.b, n / 2, depth);
        if constexpr (kIsFloat) {
          Math::AddProduct(sums, n, a, b);
        } else {
          Math::Multiply(sums, n, a, b);
        }
      }
    }
  }

  // Tells whether the sums of all threads are finite.
  ATTN_HD static bool AreFinite(const Sums& sums, int thread, Shared& shared) {
    float all = 0;
#pragma unroll
    for (int n = 0; n < kTiles * kGroups * 4; ++n) {
      all = ptx::Fma(sums[n / (4 * kGroups)][n / 4 % kGroups][n & 3], 0.0f, all);
    }
    const bool mine = !ptx::VoteAny(!(all == 0));
    if ((thread & 31) == 0) ptx::StoreShared32(&shared.not_finite[thread >> 5], !mine);
    ptx::SyncThreads();
    uint32_t any = 0;
#pragma unroll
    for (int n = 0; n < kThreads / 32; ++n) any |= ptx::LoadShared32(&shared.not_finite[n]);
    ptx::SyncThreads();
    return any == 0;
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
    const ProductOutput<kTile, typename ElementUnless<kAByDepth, Math>::Type> output(p, own, lane);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          ptx::StoreShared64(
              rows.At(Accumulator::Row(e, lane), 8 * n + Accumulator::Col(e, lane)),
              make_uint2(ptx::FloatBits(sums[m][n][e]), ptx::FloatBits(sums[m][n][e + 1])));
        }
      }
      output.template Store<Rows>(m, rows);
    }
    output.PassThroughCurve();
  }
};

}  // namespace attnd::sm80
