// WideProductKernel: C = A·B of 16-bit numbers, A by rows, in tiles of 128 × 256
// (kernels/dense/product_params.h), to the bits of sm80's ProductKernel: the tensor cores of both
// add one chain of sixteens. One warpgroup brings: a thread loads kStages steps of the depth by
// tensor maps. Two consume, each 64 rows of the tile: while one waits for its products the other's
// run. A block stays for many tiles, so that the next one's first steps come while this one's
// numbers leave.
// Errors: none. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

template <class Math, bool kBByDepth>
struct WideProductKernel {
  static constexpr int kConsumers = 2, kWarps = 4 * kConsumers;
  static constexpr int kThreads = kGroupThreads * (kConsumers + 1), kStages = 4;
  static constexpr int kRows = kWideProductRows, kColumns = kWideProductColumns;
  static constexpr int kStep = kWideProductStep, kGroups = kColumns / 8;
  static_assert(kRows == kConsumers * kGroupRows && kStep == kPanelColumns);
  struct alignas(1024) Stage {
    char a[kRows * kStep * 2], b[kColumns * kStep * 2];
  };
  using OutRows = ProductRows<kSmallProductTile>;  // a warp's numbers on their way out
  struct alignas(1024) Shared {
    Stage stages[kStages];
    OutRows out[kWarps];
    uint64_t full[kStages], empty[kStages];
  };
  static_assert(sizeof(Shared) <= 227 << 10);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    if (at.thread == 0) {
      for (int n = 0; n < kStages; ++n) {
        ptx::InitBarrier(&shared.full[n], 1);
        ptx::InitBarrier(&shared.empty[n], kWarps);
      }
      ptx::FenceBarriers();
    }
    ptx::SyncThreads();
    const auto& desc = *static_cast<const WideProductDesc*>(params.dense);
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<40>();
      if (at.thread == 0) Bring(desc, params.tile_count, at, shared);
    } else {
      ptx::TakeRegisters<232>();
      Consume(desc, params.tile_count, at, group - 1, shared);
    }
  }

 private:
  using Sums = float[kGroups][4];
  // The parity of the phase that a stage's n-th use ends.
  ATTN_HD static uint32_t Parity(uint32_t n) { return n / kStages & 1; }

  ATTN_HD static void Bring(const WideProductDesc& desc, int count, ThreadIndex at,
                            Shared& shared) {
    ptx::FenceMap(&desc.a);
    ptx::FenceMap(&desc.b);
    const ProductDesc p = desc.product;  // read once
    uint32_t n = 0;
#pragma unroll 1
    for (int tile = at.block; tile < count; tile += at.blocks) {
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(p, tile);
#pragma unroll 1
      for (int depth = 0; depth < p.depth; depth += kStep, ++n) {
        const int slot = n % kStages;
        Stage& stage = shared.stages[slot];
        uint64_t* const full = &shared.full[slot];
        ptx::WaitForPhase(&shared.empty[slot], Parity(n) ^ 1);
        ptx::ArriveExpecting(full, sizeof(Stage));
        ptx::LoadBox(stage.a, &desc.a, depth, place.row, 0, 0, full);
        LoadB(stage.b, desc.b, place.column, depth, full);
      }
    }
  }
  ATTN_HD static void LoadB(char* to, const TensorMap& map, int column, int depth,
                            uint64_t* barrier) {
    if constexpr (!kBByDepth) {
      ptx::LoadBox(to, &map, depth, column, 0, 0, barrier);
    } else {
#pragma unroll
      for (int panel = 0; panel < kColumns / kPanelColumns; ++panel) {
        ptx::LoadBox(to + panel * PanelBytes(kStep), &map, column + panel * kPanelColumns, depth, 0,
                     0, barrier);
      }
    }
  }

  ATTN_HD static void AddStep(const Stage& stage, int group, Sums& sums) {
    const uint64_t a = ptx::MatrixOf(stage.a + group * PanelBytes(kGroupRows), 16, 8 * kRowBytes);
    // A panel of B that lies by depth has kStep rows.
    const uint64_t b = ptx::MatrixOf(stage.b, kBByDepth ? PanelBytes(kStep) : 16, 8 * kRowBytes);
#pragma unroll
    for (int n = 0; n < kStep / kDepth; ++n) {
      const uint64_t of_a = ptx::MovedMatrix(a, n * 2 * kDepth);
      if constexpr (kBByDepth) {
        Math::AcrossB(sums, of_a, ptx::MovedMatrix(b, n * PanelBytes(kDepth)));
      } else {
        Math::AddRows(sums, of_a, ptx::MovedMatrix(b, n * 2 * kDepth));
      }
    }
  }
  ATTN_HD static void Consume(const WideProductDesc& desc, int count, ThreadIndex at, int group,
                              Shared& shared) {
    const ProductDesc p = desc.product;  // read once
    const int lane = at.thread % kWarpLanes, warp = at.thread / kWarpLanes - 4;
    uint32_t n = 0;
#pragma unroll 1
    for (int tile = at.block; tile < count; tile += at.blocks) {
      Sums sums;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][e] = 0;
      }
#pragma unroll 1
      for (int depth = 0; depth < p.depth; depth += kStep, ++n) {
        const int slot = n % kStages;
        ptx::WaitForPhase(&shared.full[slot], Parity(n));
        ptx::FenceProducts();
        AddStep(shared.stages[slot], group, sums);
        ptx::CommitProducts();
        ptx::WaitForProducts<0>(sums);
        if (lane == 0) ptx::Arrive(&shared.empty[slot]);
      }
      Store(p, ProductPlaceOf<kRows, kColumns>(p, tile), warp, lane, shared.out[warp], sums);
    }
  }

  struct Rows {
    ATTN_HD static int RowOf(int, int n) { return n; }
  };
  // Each warp writes its sixteen rows in groups of 32 columns, through shared memory: memory takes
  // whole lines twice as fast as the numbers of four lanes' accumulators. The bias of the next
  // columns comes meanwhile.
  ATTN_HD static void Store(const ProductDesc& p, const ProductPlace& place, int warp, int lane,
                            OutRows& rows, const Sums& sums) {
    constexpr int kTogether = kSmallProductTile / 2 / 8;  // groups
    using Output = ProductOutput<kSmallProductTile>;
    const int row = place.row + 16 * warp;
    Output next(p, {row, place.column}, lane);
#pragma unroll
    for (int first = 0; first < kGroups; first += kTogether) {
      const Output output = next;
      if (first + kTogether < kGroups) {
        next = Output(p, {row, place.column + 8 * (first + kTogether)}, lane);
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const auto& of = sums[first + n];
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          ptx::StoreShared64(rows.At(Accumulator::Row(e, lane), 8 * n + Accumulator::Col(e, lane)),
                             make_uint2(ptx::FloatBits(of[e]), ptx::FloatBits(of[e + 1])));
        }
      }
      output.template Store<Rows>(0, rows);
    }
  }
};

}  // namespace attnd::sm90
