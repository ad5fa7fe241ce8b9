// Dropout's decisions in the backward kernel (backward.h), rounds ahead of those that multiply. At
// 64 columns a warpgroup of its own makes them; at 128 there are no registers for one, and the two
// warps that prepare tiles do (backward_bringer.h). Errors: none.
//
// A generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4), which four lanes of
// two consumer warps hold. For 32 keys a lane makes four calls: of half of the queries, for two
// words of each of two consumer warps. Lanes 16 apart exchange halves of them. Bit
// 16m + 8r + 4h + 2n + e of a word is of the query 32m + 16n + 8h + 2·(lane & 3) + e and the key
// 8r + lane / 4.
#pragma once

#include "kernels/sm90/backward_layout.h"

namespace attnd::sm90 {

template <class Layout>
struct BackwardDecider {
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;

  ATTN_HD static void Run(const LaunchParams& params, int thread, Shared& shared) {
    const int warp = ptx::Uniform(thread / kWarpLanes), lane = thread % kWarpLanes;
#pragma unroll 1
    for (int tile = 0; Layout::WaitForWork(params, tile, shared); ++tile) {
      Decide(
          Layout::WorkOf(tile, shared), warp, lane, [] {}, shared);
      ptx::SyncWarp();
      if (lane == 0) ptx::Arrive(&shared.empty_work[tile % Layout::kSlots]);
    }
  }
  // Of a tile's rounds, by one of the warps; lead() is called once, near the end.
  template <class Lead>
  ATTN_HD static void Decide(const Work& work, int warp, int lane, const Lead& lead,
                             Shared& shared) {
    const QueryVisits visits = work.Visits();
    VisitCursor<Layout::Rule::kListed> at(visits);
    const int begin = work.first(), end = begin + work.rounds();
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
      if (round == begin + work.LeadRound()) lead();
      const int slot = round % Layout::kKeepStages;
      const int row = at.Visit(visits, at.Load()).First(), head = at.head();
      at.Advance(visits);
      ptx::WaitForPhase(&shared.empty_kept[slot], Layout::Parity(round, Layout::kKeepStages) ^ 1);
      DecideRound(work, warp, head, row, lane, shared.kept[slot]);
      ptx::SyncWarp();
      if (lane == 0) ptx::Arrive(&shared.full_kept[slot]);
    }
  }
  // Where a consumer's word has its decision on score (t, e).
  ATTN_HD static constexpr int BitOf(int t, int e) {
    return 16 * (t >> 2) + 8 * (e >> 1) + 4 * (t & 1) + 2 * (t >> 1 & 1) + (e & 1);
  }

 private:
  ATTN_HD static void DecideRound(const Work& work, int warp, int head, int row, int lane,
                                  uint32_t* kept) {
    const uint32_t threshold_bytes = work.problem.dropout_threshold * 0x01010101u;
    const int half = lane >> 4, query = lane & 3, key = lane >> 2 & 3;
    const DropoutPlane plane(DropoutStreamOf(work.At(head)));
    const uint32_t places = ptx::Keep(0x80808080u);  // or the mask costs an instruction more
    DropoutPlane::Row rows[4];
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      rows[n] = plane.RowOf(static_cast<uint32_t>((row >> 4) + 2 * half + (n >> 1)),
                            static_cast<uint32_t>(query * 8 + (n & 1) * 4 + key));
    }
#pragma unroll 1
    for (int unit = warp; unit < Layout::kKeys / 32; unit += Layout::kDeciderWarps) {
      const DropoutPlane::Column column =
          plane.ColumnOf(static_cast<uint32_t>((work.first_key() >> 5) + unit));
      uint32_t signs[4] = {};  // of four calls in the upper half of each byte, the last one's first
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        const PhiloxBlock bytes = plane.Bytes(rows[n], column);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t older = signs[w] >> 1;
          signs[w] = older ^ ((KeepSigns(bytes.word[w], threshold_bytes) ^ older) & places);
        }
      }
      // Bits 0 and 3 of a key.
      uint32_t* to = kept + 2 * unit * kWarpLanes + half * 4 + key * 8 + query;
      ptx::StoreShared32(to, Joined(signs[0], signs[2], half));
      ptx::StoreShared32(to + kWarpLanes, Joined(signs[1], signs[3], half));
    }
  }
  // `low`, `high`: of queries whose bit 3 is 0 and 1.
  ATTN_HD static uint32_t Joined(uint32_t low, uint32_t high, int half) {
    const uint32_t own = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
    const uint32_t other = ptx::ShuffleXor(own, 16);
    return half == 0 ? ptx::Permute(own, other, 0x6420u) : ptx::Permute(other, own, 0x7531u);
  }
};

}  // namespace attnd::sm90
