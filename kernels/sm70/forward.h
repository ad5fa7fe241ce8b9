// Exact attention for one tile of 128 queries (64 of wide heads), in one pass over K and V.
//   S = scale·Q·Kᵀ, masked      P = softmax(S)      O = (P∘Z)·V      lse = m + log(l)
// Roles: warps 0-3 make scores and probabilities (Q in registers), warps 4-7 the output (O in
// registers). A team of one of each works on the same 32 queries; where a row of O is too long for
// one warp's registers, a team is two of each: a score warp has 16 of the queries, an output warp
// half of the columns. Warps w and w + 4 share a sub-core, so softmax runs under the other's
// products. A step handles 32 keys in two groups of 16; output warps lag one group behind.
//
// P reaches its reader as A operand through shared memory: two STS.64 (or one STS.128) a lane, one
// LDS.128, no shuffles. When a group's P outgrow 2^8 (one vote on their sums, rare after
// the first steps), row factors follow the same way and O is rescaled.
// Inputs    float16; rows as kernels/rules/params.h says. Errors: none.
// Rows      with no visible key give O = 0 and lse = −inf. What an invisible V row holds never
//           reaches O: on their way in, rows beyond the sequence and, in PARTIAL tiles, infinities
//           and NaN become zero; RestoreNonFinite puts them into O where they are visible.
// Source    Dao 2023 (FlashAttention-2), Algorithm 1; docs/KERNELS.md has figures and what lost.
#pragma once

#include "kernels/sm70/forward_output.h"
#include "kernels/sm70/forward_scores.h"

namespace attnd::sm70 {

template <TileMath Math, Tile kTile, class Rule, class DropoutPolicy>
struct ForwardKernel {
  using Layout = ForwardLayout<Math, kTile, Rule, DropoutPolicy>;
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;
  static constexpr int kThreads = Layout::kThreads;

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) ptx::StoreShared32(&shared.left_out, 0);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    const SequenceDesc& sequence = shared.descriptors.sequence;
    int first_row = tile.tile * kTile.q_rows;
    int end_row = MinInt(first_row + kTile.q_rows, sequence.q_len);
    Work work = {
        {problem, sequence, tile.batch, tile.head, Rule::OptionsOf(problem)},
        typename Layout::Visits(problem, sequence, tile, first_row, end_row, shared.visits),
        first_row,
        {at.thread & 31},
        (at.thread >> 5) & (Layout::kRoleWarps - 1),
        at.thread & (Layout::kRoleThreads - 1)};
    work.tiles.Open(at.thread);
    if (work.tiles.count() == 0) {
      WriteEmptyRows(work, at.thread < Layout::kRoleThreads);
    } else if (at.thread < Layout::kRoleThreads) {
      ScoreRole<Layout>::Run(work, shared);
    } else {
      OutputRole<Layout>::Run(work, shared);
    }
  }

 private:
  // No key is visible to any row of this tile.
  ATTN_HD static void WriteEmptyRows(const Work& work, bool is_score_role) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const int row = work.block_row + work.thread;
    if (work.thread >= kTile.q_rows || row >= s.q_len) return;
    if (is_score_role) {
      ptx::StoreGlobalFloat(Layout::LseOf(work) + row, -Infinity());
      return;
    }
    if (IsRun(problem)) return;  // such rows of its O are not read
    char* out = RowOf(problem.o, s.batch, work.at.head, s.q_begin + row);
    for (int c = 0; c < problem.v_chunks; ++c) {
      ptx::StoreGlobal128(out + c * 16, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace attnd::sm70
