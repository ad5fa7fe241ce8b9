// ProductKernel: C = A·B on Volta's tensor cores (kernels/dense/product_params.h), float16 numbers
// with float32 sums. Each of four warps owns 64 × 64 numbers of C, 4 × 4 groups of 16 × 16, so that
// an LDS.128 of either operand serves four products. While a step is multiplied the next one comes
// from global memory through registers to shared memory; a warp loads what its next products need,
// also across the barrier between steps, and never waits for shared memory. Of weight gradients,
// whose A lies by depth, memory adds the sums: half the traffic of a load and a store. Some of
// these are one launch (listed_params.h), and blocks of C's first columns sum A's columns.
// Simulated (tools/voltasim): the loop 92 to 94 % of peak.
// Errors: none.
#pragma once

#include "kernels/dense/listed_params.h"
#include "kernels/sm70/product_output.h"

namespace attnd::sm70 {

// OperandStager brings a thread's part of an operand, a chunk a pass, through registers.
template <bool kByDepth>
class OperandStager {
 public:
  static constexpr int kPasses = kOperandPasses<kProductTile>;
  ATTN_HD explicit OperandStager(const OperandChunks<kProductTile, 2, kByDepth>& chunks)
      : chunks_(chunks) {}
  // The next step, of whose depth `left` are left; beyond it any numbers that exist.
  ATTN_HD void Fetch(int left) {
    left_ = left;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) held_[n] = ptx::LoadConstant128(chunks_.Pass(n, left));
    chunks_.Advance();
  }
  // Puts zeros beyond the depth.
  ATTN_HD void Put(char* stage) {
    if (left_ < kProductStep<2>) {
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        if (!chunks_.IsWithin(n, left_)) held_[n] = make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) ptx::StoreShared128(stage + chunks_.Place(n), held_[n]);
  }

 private:
  OperandChunks<kProductTile, 2, kByDepth> chunks_;
  int left_;
  uint4 held_[kPasses];
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
  // The place of depth 0 and group 0.
  ATTN_HD static int Begin(int first, Lane lane, int half) {
    return OperandLayout<kProductTile, 2, false>::Offset(
        first + InGroup(lane.quad() | lane.upper() << 2, half), 0);
  }
  // Word n is a group's.
  ATTN_HD static uint4 Load(const char* stage, int begin, int chunk, int n) {
    return ptx::LoadShared128(stage + (begin ^ chunk * 16) + n * (16 * 64));
  }
  // The operands in word n.
  ATTN_HD static constexpr int Group(int n, int) { return n; }
  ATTN_HD static constexpr int Step(int, int half) { return half; }
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
  // Word n is a pair of groups' in one step.
  ATTN_HD static uint4 Load(const char* stage, int begin, int chunk, int n) {
    const int step = n >> 1, twist = (n & 1) * 2 ^ step * 4;
    return ptx::LoadShared128(stage + (begin ^ twist * 16) + (8 * chunk + 4 * step) * 256);
  }
  ATTN_HD static constexpr int Group(int n, int half) { return (n & 1) * 2 + half; }
  ATTN_HD static constexpr int Step(int n, int) { return n >> 1; }
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
  static constexpr int kWarps = kThreads / 32;
  using Output = HalfOutput<OperandWords<kBByDepth>, kBByDepth>;
  union Shared {
    Stage stages[2];
    ProductRows<kProductTile> rows[kWarps];
    typename Output::Rows half_rows[kWarps];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const auto* of = static_cast<const ProductDesc*>(params.dense);
    int block = at.block;
    if constexpr (kAByDepth) of = ProductOfBlock(params.dense, at.thread, block);
    const ProductDesc& p = *of;
    const ProductDesc read = p;  // at once
    const ProductPart part = ProductPartOf<kProductTile>(read, block);
    const ProductPlace place = ProductPlaceOf<kProductTile>(read, part.tile);
    Sums sums;
    Zero(sums);
    float of_column = 0;
    Multiply(read, place, part, at.thread, shared, sums, of_column);
    WaitForTurn(p, part, at.thread);
    if (HasColumnSums(read, place)) AddColumnSum(read, place.row + at.thread, of_column);
    Store(p, place, at.thread, shared, sums);
    PassTurn(p, part, at.thread);
  }

 private:
  using AWords = OperandWords<kAByDepth>;
  using BWords = OperandWords<kBByDepth>;
  using Sums = typename Output::Sums;

  // Finds the one of a launch's gradients that has this block, which becomes one of its own.
  ATTN_HD static const ProductDesc* ProductOfBlock(const void* listed, int thread, int& block) {
    const int32_t* const ends = static_cast<const ListedGradients*>(listed)->ends;
    static_assert(ListedGradients::kMost == 2 * kWarpLanes);
    const uint2 own = ptx::LoadGlobal64(ends + thread % kWarpLanes * 2);
    const int product = ptx::CountBits(ptx::Ballot(block >= static_cast<int>(own.x))) +
                        ptx::CountBits(ptx::Ballot(block >= static_cast<int>(own.y)));
    if (product > 0) block -= static_cast<int>(ptx::LoadGlobal32(ends + product - 1));
    return reinterpret_cast<const ProductDesc*>(ends + ListedGradients::kMost) + product;
  }
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
                               const ProductPart& part, int thread, Shared& shared, Sums& sums,
                               float& of_column) {
    const int begin = part.begin, depth = part.depth;
    OperandStager<kAByDepth> a({p.a, p.a_stride, place.row, p.rows, begin, thread});
    OperandStager<kBByDepth> b({p.b, p.b_stride, place.column, p.columns, begin, thread});
    const Lane lane = {thread & 31};
    const int a_begin = AWords::Begin(WarpRow(thread), lane, lane.row_half());
    const int b_begin = BWords::Begin(WarpColumn(thread), lane, lane.column_half());
    const bool has_column_sums = HasColumnSums(p, place);
    if (depth <= 0) return;
    a.Fetch(depth);
    b.Fetch(depth);
    a.Put(shared.stages[0].a);
    b.Put(shared.stages[0].b);
    ptx::SyncThreads();
    Words words = {a_begin, b_begin};
    int stage = 0;
    words.LoadA(shared.stages, stage, 0);
#pragma unroll
    for (int n = 0; n < kProductGroups; ++n) words.LoadB(shared.stages, stage, n);
#pragma unroll 1
    for (int left = depth; left > 0; left -= kProductStep<2>) {
      if (has_column_sums) {
        of_column = ptx::Add(of_column, ColumnSum(shared.stages[stage].a, thread));
      }
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        // Else the assembler gathers loads and stores of many units in one place: 1 % slower.
        ptx::SyncWarp();
        Stage& next = shared.stages[stage ^ 1];
        if (unit == 0) a.Fetch(left - kProductStep<2>);
        if (unit == 2) b.Fetch(left - kProductStep<2>);
        if (unit == kPutUnit) a.Put(next.a);
        if (unit == kPutUnit + 2) b.Put(next.b);
        if (unit == kLastChunk) {
#pragma unroll
          for (int n = unit + 1; n < kUnits; ++n) words.LoadA(shared.stages, stage, n);
          ptx::SyncThreads();
        }
        if (unit < kLastChunk || unit == kUnits - 1) words.LoadA(shared.stages, stage, unit + 1);
        words.LoadB(shared.stages, stage, unit + kProductGroups);
        AddUnit(words, unit, sums);
      }
      stage ^= 1;
    }
    ptx::SyncThreads();
  }

  // ---- Sums of A's columns, a column a thread of the blocks of C's first columns: in steps, then
  // in blocks of the depth, as ColumnSumsKernel adds its stretches.
  ATTN_HD static bool HasColumnSums(const ProductDesc& p, const ProductPlace& place) {
    return kAByDepth && ColumnSumsOf(p) != nullptr && place.column == 0;
  }
  ATTN_HD static float ColumnSum(const char* stage, int thread) {
    float sum = 0;
#pragma unroll
    for (int row = 0; row < kProductStep<2>; ++row) {
      const int chunk = OperandLayout<kProductTile, 2, true>::Offset(row, thread >> 3);
      sum = ptx::Add(sum, Float16::Low(ptx::LoadShared16(stage + chunk + (thread & 7) * 2)));
    }
    return sum;
  }
  ATTN_HD static void AddColumnSum(const ProductDesc& p, int column, float sum) {
    if (column >= p.rows) return;
    float* const at = ColumnSumsOf(p) + column;
    ptx::StoreGlobalFloat(at, ptx::Add(ptx::LoadGlobalFloat(at), sum));
  }

  // A unit is a word of A times its chunk's words of B: eight products. Of A the next word comes
  // meanwhile, of B one of the next chunk.
  static constexpr int kUnits = 4 * kProductGroups, kLastChunk = kUnits - kProductGroups;
  static constexpr int kPutUnit = kBByDepth ? 8 : 9;  // simulated best
  struct Words {
    int a_begin, b_begin;
    uint4 a[kProductGroups], b[2][kProductGroups];
    // Units from kUnits on are the next stage's.
    ATTN_HD void LoadA(const Stage (&stages)[2], int stage, int unit) {
      a[unit % kProductGroups] =
          AWords::Load(stages[stage ^ unit / kUnits].a, a_begin, unit % kUnits / kProductGroups,
                       unit % kProductGroups);
    }
    ATTN_HD void LoadB(const Stage (&stages)[2], int stage, int unit) {
      b[unit / kProductGroups & 1][unit % kProductGroups] =
          BWords::Load(stages[stage ^ unit / kUnits].b, b_begin, unit % kUnits / kProductGroups,
                       unit % kProductGroups);
    }
  };
  ATTN_HD static void AddUnit(const Words& words, int unit, Sums& sums) {
    const int word = unit % kProductGroups;
    const uint4& a = words.a[word];
    const uint4(&b)[kProductGroups] = words.b[unit / kProductGroups & 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 rows = half == 0 ? make_uint2(a.x, a.y) : make_uint2(a.z, a.w);
#pragma unroll
      for (int n = 0; n < kProductGroups; ++n) {
        Add(sums[AWords::Group(word, half)][n], rows, BWords::Get(b, n, AWords::Step(word, half)));
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

  // A row of a group stands where no bank is met twice: lanes' bits 0 and 3 move it by few rows.
  struct Rows {
    ATTN_HD static int PlaceOf(int e, Lane lane) {
      return (lane.index & 1) | lane.row_half() << 1 | (e & 2) << 1 | lane.upper() << 3;
    }
    ATTN_HD static int RowOf(int group, int place) {
      return AWords::Of(group, AWords::InGroup((place & 1) | (place >> 1 & 2) | (place >> 1 & 4),
                                               place >> 1 & 1));
    }
  };
  // Each warp through memory of its own.
  ATTN_HD static void Store(const ProductDesc& desc, const ProductPlace& place, int thread,
                            Shared& shared, const Sums& sums) {
    const ProductDesc p = desc;  // read at once
    const int warp = thread >> 5;
    const Lane lane = {thread & 31};
    const ProductPlace own = {place.row + WarpRow(thread), place.column + WarpColumn(thread)};
    if constexpr (!kAByDepth) {
      if (p.c_element == kBiasFloat16) {
        return Output(p, own, lane).Store(sums, shared.half_rows[warp]);
      }
    }
    StoreGroups(p, own, lane, shared.rows[warp], sums);
  }
  // A group of rows at a time, in float32.
  ATTN_HD static void StoreGroups(const ProductDesc& p, const ProductPlace& own, Lane lane,
                                  ProductRows<kProductTile>& rows, const Sums& sums) {
    const ProductOutput<kProductTile, NoCurves> output(p, own, lane.index);
    const bool is_whole =
        own.row + kProductWarpTile <= p.rows && own.column + kProductWarpTile <= p.columns;
#pragma unroll
    for (int m = 0; m < kProductGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kProductGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const int column =
              BWords::Of(n, BWords::InGroup((lane.index & 2) | (e & 4), lane.column_half()));
          ptx::StoreShared64(
              rows.At(Rows::PlaceOf(e, lane), column),
              make_uint2(ptx::FloatBits(sums[m][n][e]), ptx::FloatBits(sums[m][n][e + 1])));
        }
      }
      if constexpr (!kAByDepth) {
        output.template Store<Rows>(m, rows);
      } else if (is_whole) {
        AddToMemory<true>(p, own, lane.index, m, rows);
      } else {
        AddToMemory<false>(p, own, lane.index, m, rows);
      }
    }
  }
  // `kWhole` says that all of the warp's numbers exist.
  template <bool kWhole>
  ATTN_HD static void AddToMemory(const ProductDesc& p, const ProductPlace& own, int lane,
                                  int group, const ProductRows<kProductTile>& rows) {
    float* c = static_cast<float*>(p.c) + own.row * p.c_stride + own.column + lane;
    ptx::SyncWarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = lane + half * kWarpLanes;
      float sums[16];
#pragma unroll
      for (int n = 0; n < 16; ++n) sums[n] = ptx::LoadSharedFloat(rows.At(n, column));
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int row = Rows::RowOf(group, n);
        if (kWhole || (own.row + row < p.rows && own.column + column < p.columns)) {
          ptx::ReduceAdd(c + row * p.c_stride + half * kWarpLanes, sums[n]);
        }
      }
    }
    ptx::SyncWarp();
  }
};

}  // namespace attnd::sm70
