// WideProductKernel: C = A·B of 16-bit numbers, A by rows, in tiles of 128 × 128, or of 64 × 128
// where those leave multiprocessors idle (kernels/dense/product_params.h), to the bits of sm80's
// ProductKernel: the tensor cores of both add one chain of sixteens. One warpgroup brings: a thread
// loads kStages steps of the depth by tensor maps. Two compute, each a tile of its own, in turns:
// while one's products run, the other's numbers leave, and pass through a curve where the product
// has one. A block stays for many tiles. Products of a launch that add to one C, in tiles of 64
// rows, wait for each other, tile by tile and warp by warp: for a tile of a lower number, whose
// block has begun before.
// Errors: none. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/dense/curves.h"
#include "kernels/dense/product_tiles.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

template <class Math, bool kBByDepth, int kTileRows = kWideProductRows>
struct WideProductKernel {
  static constexpr int kRows = kTileRows, kHalves = kRows / kGroupRows;
  static constexpr bool kTakesTurns = kRows == kShortProductRows;
  static constexpr int kGroups = 2, kGroupWarps = kWideProductWarps, kStages = kHalves > 1 ? 5 : 7;
  static constexpr int kThreads = kGroupThreads * (kGroups + 1);
  static constexpr int kColumns = kWideProductColumns, kStep = kWideProductStep;
  static_assert(kStep == kPanelColumns);
  struct alignas(1024) Stage {
    char a[kRows * kStep * 2], b[kColumns * kStep * 2];
  };
  static constexpr int kPanels = kColumns / kPanelColumns, kOutPanels = kHalves * kPanels;
  // A warp's sixteen rows of a panel on their way out.
  struct alignas(1024) Panel {
    char rows[kStoredRows * kRowBytes];
  };
  struct alignas(1024) Shared {
    Stage stages[kStages];
    Panel out[kGroups * kGroupWarps][kOutPanels];
    float biases[kGroups][kColumns];
    uint64_t full[kStages], empty[kStages], turns[kGroups];
  };
  static_assert(sizeof(Shared) <= 227 << 10);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    if (at.thread == 0) {
      for (int n = 0; n < kStages; ++n) {
        ptx::InitBarrier(&shared.full[n], 1);
        ptx::InitBarrier(&shared.empty[n], kGroupWarps);
      }
      for (uint64_t& turn : shared.turns) ptx::InitBarrier(&turn, kGroupWarps);
      ptx::FenceBarriers();
    }
    ptx::SyncThreads();
    const auto* products = static_cast<const WideProductDesc*>(params.dense);
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<40>();
      if (at.thread == 0) Bring(products, params.tile_count, at, shared);
    } else {
      ptx::TakeRegisters<232>();
      Compute(products, params.tile_count, at, group - 1, shared);
    }
  }

 private:
  using Sums = float[kColumns / 8][4];
  // The stage of a step, and the parity of the phase that its use ends.
  struct Place {
    int slot = 0;
    uint32_t parity = 0;
    ATTN_HD void Advance(int steps) {
      slot += steps;
      while (slot >= kStages) {
        slot -= kStages;
        parity ^= 1;
      }
    }
  };

  // The tiles of a block: neighbours run at a time. Where they take turns none has a lower number
  // than those of the blocks before.
  struct Tiles {
    int first, end, stride;
    ATTN_HD Tiles(int count, ThreadIndex at) : first(at.block), end(count), stride(at.blocks) {
      if constexpr (kTakesTurns) {
        const auto begin_of = [&](int64_t block) {
          return static_cast<int>(block * count / at.blocks);
        };
        first = begin_of(at.block);
        end = begin_of(at.block + 1);
        stride = 1;
      }
    }
  };

  ATTN_HD static void Bring(const WideProductDesc* products, int count, ThreadIndex at,
                            Shared& shared) {
    const WideProductDesc* desc = nullptr;
    const int all_depth = products->product.depth;
    const Tiles tiles(count, at);
    Place to;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) {
      const WideItem item = WideItemOf(products, tile);
      if (item.desc != desc) {
        desc = item.desc;
        ptx::FenceMap(&desc->a);
        ptx::FenceMap(&desc->b);
      }
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(desc->product, item.number);
#pragma unroll 1
      for (int depth = 0; depth < all_depth; depth += kStep) {
        Stage& stage = shared.stages[to.slot];
        uint64_t* const full = &shared.full[to.slot];
        ptx::WaitForPhase(&shared.empty[to.slot], to.parity ^ 1);
        ptx::ArriveExpecting(full, sizeof(Stage));
        ptx::LoadBox(stage.a, &desc->a, depth, place.row, 0, 0, full);
        LoadB(stage.b, desc->b, place.column, depth, full);
        to.Advance(1);
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

  ATTN_HD static void AddStep(const Stage& stage, int half, Sums& sums) {
    const uint64_t a = ptx::MatrixOf(stage.a + half * PanelBytes(kGroupRows), 16, 8 * kRowBytes);
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
  ATTN_HD static void Compute(const WideProductDesc* products, int count, ThreadIndex at, int group,
                              Shared& shared) {
    const int lane = at.thread % kWarpLanes, warp = at.thread / kWarpLanes - kGroupWarps;
    const int steps = (products->product.depth + kStep - 1) / kStep;
    float* const biases = shared.biases[group];
    const Tiles tiles(count, at);
    Place from;
    from.Advance(group * steps);
    uint32_t parity = group ^ 1;  // of the phase that this one's turn ends
#pragma unroll 1
    for (int tile = tiles.first + group * tiles.stride; tile < tiles.end;
         tile += kGroups * tiles.stride) {
      const WideItem item = WideItemOf(products, tile);
      const ProductDesc& p = item.desc->product;
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(p, item.number);
      ptx::BarrierSync(group + 1, kGroupThreads);  // nobody reads the last tile's
      BringBias(p, place.column, at.thread % kGroupThreads, biases);
      PrefetchSlopes(*item.desc, place, at.thread % kGroupThreads);
      const ProductPlace first = {place.row + kStoredRows * (warp % kGroupWarps), place.column};
      const Leaving leaving(*item.desc, first, lane);
      const bool is_half = p.c_element == Math::kElement;
      const AddTurn turn = kTakesTurns ? item.desc->turn : AddTurn{};
      Sums sums[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[half][i][e] = 0;
        }
      }
      ptx::WaitForPhase(&shared.turns[group], parity);
      parity ^= 1;
      int before = 0;
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        ptx::WaitForPhase(&shared.full[from.slot], from.parity);
        ptx::FenceProducts();
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          AddStep(shared.stages[from.slot], half, sums[half]);
        }
        ptx::CommitProducts();
        ptx::WaitForProducts<1>();
        if (n > 0 && lane == 0) ptx::Arrive(&shared.empty[before]);
        before = from.slot;
        from.Advance(1);
      }
      if (lane == 0) ptx::Arrive(&shared.turns[group ^ 1]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) ptx::WaitForProducts<0>(sums[half]);
      if (steps > 0 && lane == 0) ptx::Arrive(&shared.empty[before]);
      from.Advance(steps);
      ptx::BarrierSync(group + 1, kGroupThreads);
      int32_t* const word = turn.words + item.number * kGroupWarps + warp % kGroupWarps;
      if (kTakesTurns && turn.own > 0) {
        ptx::WaitForCount(reinterpret_cast<const uint32_t*>(word), turn.own);
      }
      if (is_half) {
        StoreHalves(leaving, biases, lane, shared.out[warp], sums);
      } else {
        StoreAny(p, first, lane, shared.out[warp], sums);
      }
      if (kTakesTurns && turn.words != nullptr) {
        ptx::SyncWarp();
        if (lane == 0) ptx::StoreRelease(word, turn.next);
      }
    }
  }

  ATTN_HD static void BringBias(const ProductDesc& p, int first, int n, float* biases) {
    static_assert(kColumns == kGroupThreads);
    float bias = -0.0f;  // changes no sum
    if (p.bias != nullptr && first + n < p.columns) {
      bias = LoadNumber(p.bias, p.bias_element, first + n);
    }
    biases[n] = bias;
  }

  // A row of the tile a thread.
  ATTN_HD static void PrefetchSlopes(const WideProductDesc& desc, const ProductPlace& place,
                                     int row) {
    static_assert(kRows <= kGroupThreads);
    const ProductDesc& p = desc.product;
    if (desc.product.curve.at == nullptr || row >= kRows || place.row + row >= p.rows) return;
    const char* const first = static_cast<const char*>(desc.product.curve.at) +
                              ((place.row + row) * p.c_stride + place.column) * Math::kBytes;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (place.column + panel * kPanelColumns < p.columns) {
        ptx::PrefetchLine(first + panel * kRowBytes);
      }
    }
  }

  // Where a lane's chunks of a panel go; a row of chunks is a pass's.
  static constexpr int kChunks = kPanelColumns / kNeighbours, kRowsAtOnce = kWarpLanes / kChunks,
                       kPasses = kStoredRows / kRowsAtOnce;
  struct PanelOut {
    char *c, *beside;  // null: no such
    int64_t pass_bytes;
    int row, chunk, passes;
    bool adds;

    ATTN_HD bool Has(int pass) const { return pass < passes; }
    ATTN_HD uint4 Words(const Panel& panel, int pass) const {
      return ptx::LoadShared128(panel.rows +
                                PanelOffset<kStoredRows>(pass * kRowsAtOnce + row, chunk));
    }
  };
  // The same of a tile, read from its descriptor before the numbers are there.
  struct Leaving {
    char *c, *beside;
    int64_t pass_bytes;
    int row, chunk, rows, columns;  // that exist, from the lane's first chunk on
    int32_t curve;
    bool adds, is_slope;

    ATTN_HD Leaving(const WideProductDesc& desc, const ProductPlace& first, int lane)
        : row(lane / kChunks), chunk(lane % kChunks) {
      const ProductDesc& p = desc.product;
      rows = p.rows - first.row - row;
      columns = p.columns - first.column - kNeighbours * chunk;
      pass_bytes = p.c_stride * (kRowsAtOnce * Math::kBytes);
      curve = desc.product.curve.curve;
      is_slope = desc.product.curve.at != nullptr;
      adds = p.result == kProductAdd;
      const int64_t at =
          ((first.row + row) * p.c_stride + first.column + kNeighbours * chunk) * Math::kBytes;
      const void* of_curve = is_slope ? desc.product.curve.at : desc.product.curve.value;
      c = p.c == nullptr ? nullptr : static_cast<char*>(p.c) + at;
      beside = const_cast<char*>(static_cast<const char*>(of_curve)) + at;
    }
    ATTN_HD PanelOut Of(int n) const {
      const int half = n / kPanels, panel = n % kPanels;
      const int64_t bytes = half * (kGroupRows / kRowsAtOnce) * pass_bytes + panel * kRowBytes;
      const int left = columns > panel * kPanelColumns ? rows - half * kGroupRows : 0;
      return {c == nullptr ? nullptr : c + bytes,
              beside + bytes,
              pass_bytes,
              row,
              chunk,
              (left + kRowsAtOnce - 1) / kRowsAtOnce,
              adds};
    }
  };

  // A warp's numbers of a tile, sixteen rows of each half. C has the operands' element: rounded
  // numbers stand in panels, of which whole lines leave.
  ATTN_HD static void StoreHalves(const Leaving& leaving, const float* biases, int lane,
                                  Panel (&panels)[kOutPanels], const Sums (&sums)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int group = 0; group < kColumns / 8; group += 2) {
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const auto& of = sums[half][group + n / 2];
          const float* bias = biases + 8 * (group + n / 2) + lane % 4 * 2;
          words[n] =
              Math::Pack(ptx::Add(of[n % 2 * 2], bias[0]), ptx::Add(of[n % 2 * 2 + 1], bias[1]));
        }
        ptx::StoreMatrices(panels[half * kPanels + group / 8].rows +
                               PanelOffset<kStoredRows>(lane & 15, group % 8 + (lane >> 4)),
                           make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    ptx::SyncWarp();
    if (leaving.curve == 0) {
#pragma unroll 1
      for (int n = 0; n < kOutPanels; ++n) StorePanel(leaving.Of(n), panels[n]);
      return;
    }
    WithCurve(leaving.curve, [&](auto curve) {
#pragma unroll 1
      for (int n = 0; n < kOutPanels; ++n) {
        if (leaving.is_slope) {
          StoreSlopes<decltype(curve)::kCode>(leaving.Of(n), panels[n]);
        } else {
          StoreCurve<decltype(curve)::kCode>(leaving.Of(n), panels[n]);
        }
      }
    });
  }
  ATTN_HD static void StorePanel(const PanelOut& out, const Panel& panel) {
    uint4 words[kPasses], old[kPasses];
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      if (out.adds && out.Has(n)) old[n] = ptx::LoadGlobal128(out.c + n * out.pass_bytes);
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      words[n] = out.Words(panel, n);
      if (!out.adds) continue;
      float numbers[kNeighbours], there[kNeighbours];
      Unpack<Math>(words[n], numbers);
      Unpack<Math>(old[n], there);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) numbers[i] = ptx::Add(there[i], numbers[i]);
      words[n] = Packed<Math>(numbers);
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      if (out.Has(n)) ptx::StoreGlobal128(out.c + n * out.pass_bytes, words[n]);
    }
  }
  template <int32_t kCurve>
  ATTN_HD static void StoreCurve(const PanelOut& out, const Panel& panel) {
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const uint4 words = out.Words(panel, n);
      float numbers[kNeighbours];
      Unpack<Math>(words, numbers);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) numbers[i] = CurveValue<kCurve>(numbers[i]);
      if (!out.Has(n)) continue;
      if (out.c != nullptr) ptx::StoreGlobal128(out.c + n * out.pass_bytes, words);
      ptx::StoreGlobal128(out.beside + n * out.pass_bytes, Packed<Math>(numbers));
    }
  }
  template <int32_t kCurve>
  ATTN_HD static void StoreSlopes(const PanelOut& out, const Panel& panel) {
    uint4 there[kPasses];
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      if (out.Has(n)) there[n] = ptx::LoadGlobal128(out.beside + n * out.pass_bytes);
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      float numbers[kNeighbours], x[kNeighbours];
      Unpack<Math>(out.Words(panel, n), numbers);
      Unpack<Math>(there[n], x);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) numbers[i] = SlopeTimes<kCurve>(x[i], numbers[i]);
      if (out.Has(n)) ptx::StoreGlobal128(out.c + n * out.pass_bytes, Packed<Math>(numbers));
    }
  }

  struct Rows {
    ATTN_HD static int RowOf(int, int n) { return n; }
  };
  // C of any element, in groups of 32 columns.
  ATTN_HD static void StoreAny(const ProductDesc& p, const ProductPlace& first, int lane,
                               Panel (&panels)[kOutPanels], const Sums (&sums)[kHalves]) {
    using Output = ProductOutput<kSmallProductTile, NoCurves>;
    using OutRows = ProductRows<kSmallProductTile>;
    static_assert(sizeof(OutRows) <= sizeof(panels));
    constexpr int kTogether = kSmallProductTile / 2 / 8;  // groups
    auto& rows = reinterpret_cast<OutRows&>(panels);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int begin = 0; begin < kColumns / 8; begin += kTogether) {
        const Output output(p, {first.row + half * kGroupRows, first.column + 8 * begin}, lane);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const auto& of = sums[half][begin + n];
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
