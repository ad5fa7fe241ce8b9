// Gradients of attention for one tile of keys, in one pass over the queries that see them.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// A block has 128 keys of one KV head and goes through rounds of 64 queries, all query heads of the
// group. One warpgroup brings (backward_bringer.h), two multiply 64 keys each
// (backward_consumer.h). Barriers in shared memory hand tiles over. What belongs to a lane's scores
// stays in its registers: P and dS are operands there, and only dS goes through shared memory, for
// dQ. Sums of dQ leave a round later in bulk; DqKernel (rules/query_gradient.h) puts them into
// place.
//
// dQ's additions, rows without visible keys, infinities and NaN: as in sm80/backward.h, but second
// integers of dQ are kept for rows that need them alone (DeltaKernel, rules/backward_passes.h).
// Inputs float16 or bfloat16; tensor maps of Q, K, V, dO (kernels/rules/params.h). Errors: none.
// Source Shah et al. 2024 (FlashAttention-3), section 3; docs/KERNELS.md has figures.
#pragma once

#include "kernels/sm90/backward_consumer.h"

namespace attnd::sm90 {

template <class Math, Tile kTile, class Rule, class Dropout, class DqSums>
struct BackwardKernel {
  using Layout = BackwardLayout<Math, kTile, Rule, Dropout, DqSums>;
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;
  static constexpr int kThreads = Layout::kThreads;
  // 64 Ki registers an SM. At 128 columns products would wait for registers with fewer than 240.
  static constexpr int kBringerRegisters = kTile.head_dim > 64 ? 24 : 40;
  static constexpr int kConsumerRegisters = kTile.head_dim > 64 ? 240 : 232;
  static_assert(!Rule::kEveryTile);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    const int lane = at.thread % kWarpLanes;
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) InitBarriers(shared);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    const SequenceDesc& sequence = shared.descriptors.sequence;
    if (at.thread == 0) BackwardBringer<Layout>::LoadKeys(problem, sequence, tile, shared);
    const int first_key = tile.tile * Layout::kKeys;
    const int end_key = MinInt(first_key + Layout::kKeys, sequence.kv_len);
    const QueryVisits visits(problem, sequence, tile, first_key, end_key);
    if (at.thread < kWarpLanes) {
      const int rounds = visits.Count(lane);
      if (lane == 0) ptx::StoreShared32(&shared.rounds, static_cast<uint32_t>(rounds));
    }
    ptx::SyncThreads();
    const uint32_t* bounds = GradientBounds(problem, tile.batch, tile.head);
    const Work work = {problem,
                       sequence,
                       visits,
                       tile.batch,
                       tile.head,
                       first_key,
                       ptx::Uniform(static_cast<int>(ptx::LoadShared32(&shared.rounds))),
                       GradientExponent(problem, tile.batch, tile.head, RoundedP::kMargin),
                       ptx::LoadConstant32(bounds + kNonFiniteRows) != 0};
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<kBringerRegisters>();
      if (work.rounds > 0) {
        BackwardBringer<Layout>::Run(work, ptx::Uniform(at.thread / kWarpLanes), lane, shared);
      }
    } else {
      ptx::TakeRegisters<kConsumerRegisters>();
      BackwardConsumer<Layout>(work, group - 1, at.thread % kGroupThreads, shared).Run();
    }
  }

 private:
  template <int kCount>
  ATTN_HD static void Init(uint64_t (&barriers)[kCount], int arrivals) {
    for (int n = 0; n < kCount; ++n) ptx::InitBarrier(&barriers[n], arrivals);
  }
  ATTN_HD static void InitBarriers(Shared& shared) {
    constexpr int kWarps = Layout::kConsumerWarps;
    ptx::InitBarrier(&shared.full_k, 1);
    ptx::InitBarrier(&shared.full_v, 1);
    ptx::InitBarrier(&shared.raw, 1);
    Init(shared.full_q, 2);
    Init(shared.empty_q, kWarps);
    Init(shared.full_d_o, 2);
    Init(shared.empty_d_o, kWarps);
    Init(shared.full_ds, kWarps);
    Init(shared.empty_ds, kWarps);
    Init(shared.full_kept, 2);
    Init(shared.empty_kept, kWarps);
    ptx::FenceBarriers();
  }
};

}  // namespace attnd::sm90
