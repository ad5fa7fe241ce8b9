// merge_runs.h: merges the runs of long lists (list_runs.h), after the kernel that made them:
//   O = Σ_n e^(lse_n − lse)·O_n    lse = ln(Σ_n e^lse_n + the sink's e^logit)    dK = Σ_n dK_n
// n ascends, so bits depend on the list alone. Any architecture. Errors: none.
#pragma once

#include "kernels/rules/list_runs.h"
#include "kernels/rules/online_softmax.h"

namespace attnd {

// One block for kMergedRows rows of a tile that is cut, a warp for each: TileWork.tile says which,
// TileWork.problem is that of its first run; those of the others follow. `Element`: of O.
template <class Element>
struct MergeOutputsKernel {
  static constexpr int kThreads = kMergedRows * 32;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc* runs = params.problems + tile.problem;
    const ProblemDesc& whole = params.problems[runs[0].tile_lists.whole];
    const int row = tile.tile * kMergedRows + at.thread / 32;
    if (row >= whole.sequences[tile.batch].q_len) return;
    MergeRow(runs, whole, tile, row, at.thread % 32);
  }

 private:
  ATTN_HD static void MergeRow(const ProblemDesc* runs, const ProblemDesc& whole,
                               const TileWork& tile, int row, int lane) {
    const SequenceDesc& s = whole.sequences[tile.batch];
    const float sink = whole.denominator == kDenominatorSink
                           ? ptx::LoadConstantFloat(whole.sink_logits + tile.head)
                           : -Infinity();
    const bool has_sink = sink != -Infinity();
    float lse[kListRuns], top = -Infinity();
    bool is_seen = false, counts[kListRuns];
#pragma unroll
    for (int n = 0; n < kListRuns; ++n) {
      lse[n] = ptx::LoadGlobalFloat(LseOf(runs[n], s, tile.head) + row);
      is_seen |= lse[n] != -Infinity();
      counts[n] = lse[n] != -Infinity() && ptx::FloatBits(lse[n]) != kNothingFinite;
      if (counts[n]) top = ptx::Max(top, lse[n]);
    }
    if (has_sink) top = ptx::Max(top, sink);
    float total = has_sink ? ptx::Exp2((sink - top) * kLog2E) : 0.0f;
    float weights[kListRuns];
#pragma unroll
    for (int n = 0; n < kListRuns; ++n) {
      weights[n] = counts[n] ? ptx::Exp2((lse[n] - top) * kLog2E) : 0.0f;
      total += weights[n];
    }
    // Rows whose visible scores are all −infinity give 0/0.
    const float share = total == 0 ? ptx::BitsFloat(kNothingFinite) : ptx::Reciprocal(total);
    const float merged = total == 0 ? share : top + ptx::Log2(total) * kLn2;
    if (lane == 0) {
      ptx::StoreGlobalFloat(LseOf(whole, s, tile.head) + row, is_seen ? merged : -Infinity());
    }
    char* out = RowOf(whole.o, s.batch, tile.head, s.q_begin + row);
    for (int word = lane; word < whole.v_chunks * 4; word += 32) {
      float low = 0, high = 0;
#pragma unroll
      for (int n = 0; n < kListRuns; ++n) {
        if (!counts[n]) continue;
        const uint2 pair =
            ptx::LoadGlobal64(RowOf(runs[n].o, s.batch, tile.head, s.q_begin + row) + word * 8);
        low += Weighted(ptx::BitsFloat(pair.x), weights[n] * share);
        high += Weighted(ptx::BitsFloat(pair.y), weights[n] * share);
      }
      if (is_seen && total == 0) low = high = share;
      ptx::StoreGlobal32(out + word * 4, Element::Pack(low, high));
    }
  }
  ATTN_HD static float* LseOf(const ProblemDesc& p, const SequenceDesc& s, int head) {
    return p.lse + s.batch * p.lse_batch + head * p.lse_head + s.q_begin;
  }
  // Infinities count, however small their weight, as in one run (restore_non_finite.h).
  ATTN_HD static float Weighted(float value, float weight) {
    return value - value == 0 ? value * weight : value;
  }
};

// The same for keys: dK and dV.
struct MergeKeyGradientsKernel {
  static constexpr int kThreads = kMergedRows * 32;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc* runs = params.problems + tile.problem;
    const ProblemDesc& whole = params.problems[runs[0].tile_lists.whole];
    const SequenceDesc& s = whole.sequences[tile.batch];
    const int key = tile.tile * kMergedRows + at.thread / 32, lane = at.thread % 32;
    if (key >= s.kv_len) return;
    const auto merge = [&](RowTensor ProblemDesc::*of, int chunks) {
      char* out = RowOf(whole.*of, s.batch, tile.head, s.kv_begin + key);
      const GradientWriter writer(whole, 1.0f, 0);
      for (int word = lane; word < chunks * 4; word += 32) {
        float low = 0, high = 0;
#pragma unroll
        for (int run = 0; run < kListRuns; ++run) {
          const char* from = RowOf(runs[run].*of, s.batch, tile.head, s.kv_begin + key);
          const uint2 pair = ptx::LoadGlobal64(from + word * 8);
          low += ptx::BitsFloat(pair.x);
          high += ptx::BitsFloat(pair.y);
        }
        ptx::StoreGlobal32(out + word * 4, writer.Pack(low, high));
      }
    };
    merge(&ProblemDesc::d_k, whole.qk_chunks);
    merge(&ProblemDesc::d_v, whole.v_chunks);
  }
};

}  // namespace attnd
