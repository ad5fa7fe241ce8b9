// WideProductKernel: C = A·B of 16-bit numbers in tiles of 128 × 256, or of gradients 128 × 128
// (kernels/dense/product_params.h), to the bits of sm80's ProductKernel: the tensor cores of both
// add one chain of sixteens. One warpgroup brings: a thread loads kStages steps of the depth by
// tensor maps. Two consume, each 64 rows of the tile: while one waits for its products the other's
// run; of gradients one has all rows, and another block's run. A block stays for many tiles, so
// that the next one's first steps come while this one's numbers leave. Gradients take turns at a
// tile, so their blocks begin in order, each for one tile.
// Errors: none. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

template <class Math, bool kAByDepth, bool kBByDepth>
struct WideProductKernel {
  static constexpr bool kStays = !kAByDepth;
  // Consuming warpgroups, and how often each has 64 rows of the tile.
  static constexpr int kConsumers = kStays ? 2 : 1, kRowGroups = kStays ? 1 : 2;
  static constexpr int kThreads = kGroupThreads * (kConsumers + 1);
  static constexpr int kStages = kStays ? 4 : 3, kBlocks = kStays ? 1 : 2;  // of a multiprocessor
  static constexpr int kRows = kWideProductRows;
  static constexpr int kColumns = kStays ? kWideProductColumns : 128;
  static constexpr int kStep = kWideProductStep, kGroups = kColumns / 8;
  static_assert(kRows == kConsumers * kRowGroups * kGroupRows && kStep == kPanelColumns);
  struct alignas(1024) Stage {
    char a[kRows * kStep * 2], b[kColumns * kStep * 2];
  };
  using OutRows = ProductRows<kSmallProductTile>;  // a warp's numbers on their way out
  static constexpr int kOutBytes = sizeof(OutRows) * 4 * kConsumers;
  struct alignas(1024) Shared {
    Stage stages[kStages];
    alignas(16) char out[kStays ? kOutBytes : 16];  // else they leave through the stages
    uint64_t full[kStages], empty[kStages];
  };
  static_assert(sizeof(Shared) <= (kStays ? 227 : 113) << 10 && kOutBytes <= sizeof(Stage));

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    if (at.thread == 0) {
      for (int n = 0; n < kStages; ++n) {
        ptx::InitBarrier(&shared.full[n], 1);
        ptx::InitBarrier(&shared.empty[n], 4 * kConsumers);
      }
      ptx::FenceBarriers();
    }
    ptx::SyncThreads();
    const auto& desc = *static_cast<const WideProductDesc*>(params.dense);
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<kStays ? 40 : 24>();
      if (at.thread == 0) Bring(desc, params.tile_count, at, shared);
    } else {
      ptx::TakeRegisters<232>();
      Consume(desc.product, params.tile_count, at, group - 1, shared);
    }
  }

 private:
  enum BarrierId { kAdding = 1 };
  using Sums = float[kRowGroups][kGroups][4];
  // The parity of the phase that a stage's n-th use ends.
  ATTN_HD static uint32_t Parity(uint32_t n) { return n / kStages & 1; }

  // A step of an operand of kSize rows (columns) of C, from `first` on.
  template <int kSize, bool kByDepth>
  ATTN_HD static void LoadStep(char* to, const TensorMap& map, int first, int depth,
                               uint64_t* barrier) {
    if constexpr (!kByDepth) {
      ptx::LoadBox(to, &map, depth, first, 0, 0, barrier);
    } else {
#pragma unroll
      for (int panel = 0; panel < kSize / kPanelColumns; ++panel) {
        ptx::LoadBox(to + panel * PanelBytes(kStep), &map, first + panel * kPanelColumns, depth, 0,
                     0, barrier);
      }
    }
  }
  ATTN_HD static void Bring(const WideProductDesc& desc, int count, ThreadIndex at,
                            Shared& shared) {
    ptx::FenceMap(&desc.a);
    ptx::FenceMap(&desc.b);
    uint32_t n = 0;
#pragma unroll 1
    for (int item = at.block; item < count; item += at.blocks) {
      const ProductPart part = ProductPartOf<kRows, kColumns>(desc.product, item);
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(desc.product, part.tile);
#pragma unroll 1
      for (int depth = 0; depth < part.depth; depth += kStep, ++n) {
        const int slot = n % kStages;
        Stage& stage = shared.stages[slot];
        ptx::WaitForPhase(&shared.empty[slot], Parity(n) ^ 1);
        ptx::ArriveExpecting(&shared.full[slot], sizeof(Stage));
        LoadStep<kRows, kAByDepth>(stage.a, desc.a, place.row, part.begin + depth,
                                   &shared.full[slot]);
        LoadStep<kColumns, kBByDepth>(stage.b, desc.b, place.column, part.begin + depth,
                                      &shared.full[slot]);
      }
    }
  }

  // The distance from one product of a step to the next, in bytes of an operand.
  static constexpr int Move(bool by_depth) { return by_depth ? PanelBytes(kDepth) : 2 * kDepth; }
  ATTN_HD static void AddStep(const Stage& stage, int group, Sums& sums) {
    // A panel of one that lies by depth has kStep rows.
    const uint64_t a = ptx::MatrixOf(stage.a + group * kRowGroups * PanelBytes(kGroupRows),
                                     kAByDepth ? PanelBytes(kStep) : 16, 8 * kRowBytes);
    const uint64_t b = ptx::MatrixOf(stage.b, kBByDepth ? PanelBytes(kStep) : 16, 8 * kRowBytes);
#pragma unroll
    for (int n = 0; n < kStep / kDepth; ++n) {
      const uint64_t of_b = ptx::MovedMatrix(b, n * Move(kBByDepth));
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
        const uint64_t of_a =
            ptx::MovedMatrix(a, m * PanelBytes(kGroupRows) + n * Move(kAByDepth));
        if constexpr (kAByDepth) {
          Math::Across(sums[m], of_a, of_b);
        } else if constexpr (kBByDepth) {
          Math::AcrossB(sums[m], of_a, of_b);
        } else {
          Math::AddRows(sums[m], of_a, of_b);
        }
      }
    }
  }
  ATTN_HD static void Consume(const ProductDesc& p, int count, ThreadIndex at, int group,
                              Shared& shared) {
    const int lane = at.thread % kWarpLanes, thread = at.thread - kGroupThreads;
    const auto sync = [] { ptx::BarrierSync(kAdding, kConsumers * kGroupThreads); };
    uint32_t n = 0;
#pragma unroll 1
    for (int item = at.block; item < count; item += at.blocks) {
      const ProductPart part = ProductPartOf<kRows, kColumns>(p, item);
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(p, part.tile);
      Sums sums;
#pragma unroll
      for (int i = 0; i < kRowGroups * kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i / kGroups][i % kGroups][e] = 0;
      }
#pragma unroll 1
      for (int depth = 0; depth < part.depth; depth += kStep, ++n) {
        const int slot = n % kStages;
        ptx::WaitForPhase(&shared.full[slot], Parity(n));
        ptx::FenceProducts();
        AddStep(shared.stages[slot], group, sums);
        ptx::CommitProducts();
#pragma unroll
        for (int m = 0; m < kRowGroups; ++m) ptx::WaitForProducts<0>(sums[m]);
        if (lane == 0) ptx::Arrive(&shared.empty[slot]);
      }
      if constexpr (!kStays) sync();  // all have done with the stages
      WaitForTurn(p, part, thread, sync);
      Store(p, place, thread, shared, sums);
      PassTurn(p, part, thread, sync);
    }
  }

  struct Rows {
    ATTN_HD static int RowOf(int, int n) { return n; }
  };
  // Each warp writes its sixteen rows of every 64 in groups of 32 columns, through shared memory:
  // memory takes whole lines twice as fast as the numbers of four lanes' accumulators.
  ATTN_HD static void Store(const ProductDesc& p, const ProductPlace& place, int thread,
                            Shared& shared, const Sums& sums) {
    constexpr int kTogether = kSmallProductTile / 2 / 8;  // groups
    const int warp = thread / kWarpLanes, lane = thread % kWarpLanes;
    auto& rows = reinterpret_cast<OutRows*>(kStays ? shared.out : shared.stages[0].a)[warp];
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int first = 0; first < kGroups; first += kTogether) {
        const ProductOutput<kSmallProductTile> output(
            p, {place.row + m * kGroupRows + 16 * warp, place.column + 8 * first}, lane);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const auto& of = sums[m][first + n];
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            ptx::StoreShared64(
                rows.At(Accumulator::Row(e, lane), 8 * n + Accumulator::Col(e, lane)),
                make_uint2(ptx::FloatBits(of[e]), ptx::FloatBits(of[e + 1])));
          }
        }
        output.template Store<Rows>(0, rows);
      }
    }
  }
};

}  // namespace attnd::sm90
