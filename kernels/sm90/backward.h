// Gradients of attention for one tile of keys, in one pass over the queries that see them.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// A block stays for many tiles: 128 keys of one KV head, and rounds of 64 queries, all query heads
// of the group. One warpgroup brings (backward_bringer.h) and two multiply 64 keys each
// (backward_consumer.h); dropout's decisions were made ahead (dropout_bits.h). Barriers in shared
// memory hand tiles over. What belongs to a lane's scores stays in its registers: P and dS are
// operands there, and only dS goes through shared memory, for dQ. Sums of dQ leave a round later
// in bulk; DqKernel (rules/query_gradient.h) puts them into place.
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
  static constexpr int kThreads = Layout::kThreads;
  // 64 Ki registers an SM: 504 for a thread of each of three warpgroups. At 128 columns products
  // would wait for registers with fewer than 240.
  static constexpr int kOtherRegisters = kTile.head_dim > 64 ? 24 : 40;
  static constexpr int kConsumerRegisters = (504 - kOtherRegisters) / 2;
  static_assert(!Rule::kEveryTile);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    ptx::LaunchNext();  // query_gradient.h
    if (at.thread == 0) InitBarriers(shared);
    ptx::SyncThreads();
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<kOtherRegisters>();
      BackwardBringer<Layout>::Run(params, at, shared);
    } else {
      ptx::TakeRegisters<kConsumerRegisters>();
      BackwardConsumer<Layout>::RunAll(params, group - 1, at.thread % kGroupThreads, shared);
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
    ptx::InitBarrier(&shared.empty_k, kWarps);
    ptx::InitBarrier(&shared.full_v, 1);
    ptx::InitBarrier(&shared.empty_v, kWarps);
    Init(shared.full_work, kWarpLanes);
    Init(shared.empty_work, kWarps + 2);  // and those that load tiles and bring rows
    ptx::InitBarrier(&shared.raw, 1);
    ptx::InitBarrier(&shared.near_end, 1);
    Init(shared.full_q, 2);
    Init(shared.empty_q, kWarps);
    Init(shared.full_d_o, 2);
    Init(shared.empty_d_o, kWarps);
    Init(shared.full_ds, kWarps);
    Init(shared.empty_ds, kWarps);
    ptx::FenceBarriers();
  }
};

}  // namespace attnd::sm90
