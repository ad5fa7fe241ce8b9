// ProductKernel: C = A·B on Volta's tensor cores (kernels/dense/product_params.h), float16 numbers
// with float32 sums. Each of four warps owns 64 × 64 numbers of C, 4 × 4 groups of 16 × 16; what
// of A and B a step needs passes from global memory through registers to shared memory, two steps
// deep, so that an LDS.128 of either serves four products.
// Errors: none.
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

inline constexpr int kProductWarpTile = kProductTile / 2, kProductGroups = kProductWarpTile / 16;

// What a thread of an operand brings: fetched before the barrier of the step before it is put.
template <bool kByDepth>
class OperandStager {
 public:
  ATTN_HD explicit OperandStager(const OperandChunks<kProductTile, 2, kByDepth>& chunks)
      : chunks_(chunks) {
#pragma unroll
    for (int n = 0; n < kOperandPasses<kProductTile>; ++n) held_[n] = make_uint4(0, 0, 0, 0);
  }
  // The next step, of whose depth `left` are left.
  ATTN_HD void Fetch(int left) {
    left_ = left;
#pragma unroll
    for (int n = 0; n < kOperandPasses<kProductTile>; ++n) {
      ptx::LoadConstant128If(held_[n], chunks_.Pass(n),
                             chunks_.Exists(n) && chunks_.IsWithin(n, left));
    }
    chunks_.Advance();
  }
  // What lies beyond the depth is zero; rows of C that do not exist hold anything.
  ATTN_HD void Put(char* stage) {
    if (left_ < kProductStep<2>) {
#pragma unroll
      for (int n = 0; n < kOperandPasses<kProductTile>; ++n) {
        if (!chunks_.IsWithin(n, left_)) held_[n] = make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int n = 0; n < kOperandPasses<kProductTile>; ++n) {
      ptx::StoreShared128(stage + chunks_.Place(n), held_[n]);
    }
  }

 private:
  OperandChunks<kProductTile, 2, kByDepth> chunks_;
  int left_ = 0;
  uint4 held_[kOperandPasses<kProductTile>];
};

// A warp's 64 rows (columns) of an operand, eight of the depth: operands of two products for each
// of four groups. `half` picks a lane's half of a group: its rows of A, its columns of B. Place p
// is a row (column) of a quad-pair's 8 × 8.
template <bool kByDepth>
struct OperandWords;
template <>
struct OperandWords<false> {
  ATTN_HD static constexpr int InGroup(int p, int half) {
    return (p & 3) | half << 2 | p >> 2 << 3;
  }
  ATTN_HD static constexpr int Of(int group, int in_group) { return 16 * group + in_group; }
  // Of depth 0 and group 0.
  ATTN_HD static int Begin(int first, Lane lane, int half) {
    return OperandLayout<kProductTile, 2, false>::Offset(
        first + InGroup(lane.quad() | lane.upper() << 2, half), 0);
  }
  ATTN_HD static void Load(const char* stage, int begin, int chunk,
                           uint4 (&words)[kProductGroups]) {
#pragma unroll
    for (int group = 0; group < kProductGroups; ++group) {
      words[group] = ptx::LoadShared128(stage + (begin ^ chunk * 16) + group * (16 * 64));
    }
  }
  ATTN_HD static uint2 Get(const uint4 (&words)[kProductGroups], int group, int step) {
    const uint4& w = words[group];
    return step == 0 ? make_uint2(w.x, w.y) : make_uint2(w.z, w.w);
  }
};
template <>
struct OperandWords<true> {
  ATTN_HD static constexpr int InGroup(int p, int half) { return p | half << 3; }
  ATTN_HD static constexpr int Of(int group, int in_group) {
    return (group >> 1) * 16 + (group & 1) * 4 + (in_group & 3) + (in_group >> 2 & 1) * 8 +
           (in_group >> 3) * 32;
  }
  ATTN_HD static int Begin(int first, Lane lane, int half) {
    return OperandLayout<kProductTile, 2, true>::Offset(lane.quad(),
                                                        first / 8 + (lane.upper() | half << 2));
  }
  ATTN_HD static void Load(const char* stage, int begin, int chunk,
                           uint4 (&words)[kProductGroups]) {
#pragma unroll
    for (int n = 0; n < kProductGroups; ++n) {  // step, pair of groups
      const int step = n >> 1, twist = (n & 1) * 2 ^ step * 4;
      words[n] = ptx::LoadShared128(stage + (begin ^ twist * 16) + (8 * chunk + 4 * step) * 256);
    }
  }
  ATTN_HD static uint2 Get(const uint4 (&words)[kProductGroups], int group, int step) {
    const uint4& w = words[2 * step + (group >> 1)];
    return (group & 1) == 0 ? make_uint2(w.x, w.y) : make_uint2(w.z, w.w);
  }
};

template <bool kAByDepth, bool kBByDepth>
struct ProductKernel {
  static_assert(kBByDepth || !kAByDepth);
  static constexpr int kThreads = kProductThreads;
  struct Stage {
    alignas(128) char a[kOperandBytes<kProductTile>];
    alignas(128) char b[kOperandBytes<kProductTile>];
  };
  union Shared {
    Stage stages[2];
    ProductRows<kProductTile, 4> rows[kThreads / 32];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const ProductDesc& p = *static_cast<const ProductDesc*>(params.dense);
    const ProductPart part = ProductPartOf<kProductTile>(p, at.block);
    const ProductPlace place = ProductPlaceOf<kProductTile>(p, part.tile);
    Sums sums;
    Zero(sums);
    Multiply(p, place, part, at.thread, shared, sums);
    WaitForTurn(p, part, at.thread);
    Store(p, place, at.thread, shared, sums);
    PassTurn(p, part, at.thread);
  }

 private:
  using AWords = OperandWords<kAByDepth>;
  using BWords = OperandWords<kBByDepth>;
  using Sums = float[kProductGroups][kProductGroups][8];

  ATTN_HD static void Zero(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kProductGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kProductGroups; ++n) Float32Accumulate::Zero(sums[m][n]);
    }
  }
  ATTN_HD static int WarpRow(int thread) { return (thread >> 6) * kProductWarpTile; }
  ATTN_HD static int WarpColumn(int thread) { return (thread >> 5 & 1) * kProductWarpTile; }

  ATTN_HD static void Multiply(const ProductDesc& p, const ProductPlace& place,
                               const ProductPart& part, int thread, Shared& shared, Sums& sums) {
    const int begin = part.begin, depth = part.depth;
    OperandStager<kAByDepth> a({p.a, p.a_stride, place.row, p.rows, begin, thread});
    OperandStager<kBByDepth> b({p.b, p.b_stride, place.column, p.columns, begin, thread});
    const Lane lane = {thread & 31};
    const int a_begin = AWords::Begin(WarpRow(thread), lane, lane.row_half());
    const int b_begin = BWords::Begin(WarpColumn(thread), lane, lane.column_half());
    a.Fetch(depth);
    b.Fetch(depth);
    a.Put(shared.stages[0].a);
    b.Put(shared.stages[0].b);
    a.Fetch(depth - kProductStep<2>);
    b.Fetch(depth - kProductStep<2>);
    ptx::SyncThreads();
    int stage = 0;
#pragma unroll 1
    for (int left = depth; left > 0; left -= kProductStep<2>) {
      const Stage& from = shared.stages[stage];
      stage ^= 1;
      AddChunk(from, 0, a_begin, b_begin, sums);
      AddChunk(from, 1, a_begin, b_begin, sums);
      a.Put(shared.stages[stage].a);
      b.Put(shared.stages[stage].b);
      AddChunk(from, 2, a_begin, b_begin, sums);
      a.Fetch(left - 2 * kProductStep<2>);
      b.Fetch(left - 2 * kProductStep<2>);
      AddChunk(from, 3, a_begin, b_begin, sums);
      ptx::SyncThreads();
    }
  }

  // Eight of the depth.
  ATTN_HD static void AddChunk(const Stage& stage, int chunk, int a_begin, int b_begin,
                               Sums& sums) {
    uint4 a[kProductGroups], b[kProductGroups];
    AWords::Load(stage.a, a_begin, chunk, a);
    BWords::Load(stage.b, b_begin, chunk, b);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int m = 0; m < kProductGroups; ++m) {
        const uint2 rows = AWords::Get(a, m, step);
#pragma unroll
        for (int n = 0; n < kProductGroups; ++n) {
          Add(sums[m][n], rows, BWords::Get(b, n, step));
        }
      }
    }
  }
  ATTN_HD static void Add(float (&sums)[8], uint2 a, uint2 b) {
    if constexpr (kAByDepth) {
      ptx::MmaColRow(sums, a.x, a.y, b.x, b.y);
    } else if constexpr (kBByDepth) {
      ptx::MmaRowRow(sums, a.x, a.y, b.x, b.y);
    } else {
      ptx::MmaRowCol(sums, a.x, a.y, b.x, b.y);
    }
  }

  struct Rows {
    ATTN_HD static int RowOf(int group, int n) { return AWords::Of(group, n); }
  };
  // A group of rows at a time; each warp through memory of its own.
  ATTN_HD static void Store(const ProductDesc& p, const ProductPlace& place, int thread,
                            Shared& shared, const Sums& sums) {
    auto& rows = shared.rows[thread >> 5];
    const Lane lane = {thread & 31};
    const ProductPlace own = {place.row + WarpRow(thread), place.column + WarpColumn(thread)};
    const ProductOutput<kProductTile> output(p, own, thread & 31);
#pragma unroll
    for (int m = 0; m < kProductGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kProductGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const int row =
              AWords::InGroup((lane.index & 1) | (e & 2) | lane.upper() << 2, lane.row_half());
          const int column =
              BWords::Of(n, BWords::InGroup((lane.index & 2) | (e & 4), lane.column_half()));
          ptx::StoreShared64(
              &rows.sums[row][column],
              make_uint2(ptx::FloatBits(sums[m][n][e]), ptx::FloatBits(sums[m][n][e + 1])));
        }
      }
      output.Store<Rows>(m, rows);
    }
  }
};

}  // namespace attnd::sm70
