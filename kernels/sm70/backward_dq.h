// dQ of one backward block: once a round all its warps multiply dS of the round's queries with the
// block's K and add it to a workspace in the order of eight warps' lanes, so that each addition is
// one full line (of up to 32 columns two halves); DqKernel puts that into place
// (rules/query_gradient.h; FixedPoint bounds the integers). A piece of backward.h's schedule, which
// says when. Errors: none.
#pragma once

#include "kernels/ptx/mma_sm70.h"
#include "kernels/sm70/backward_passes.h"

namespace attnd::sm70 {

template <class Kernel>
class QueryGradient {
 public:
  using Work = typename Kernel::Work;
  using Shared = typename Kernel::Shared;
  using Places = typename Kernel::Places;
  using Dq = typename Kernel::Dq;
  static constexpr int kKeys = Kernel::kKeys, kRowBytes = Kernel::kRowBytes;
  // Short rows fill half of a product's columns: the column halves multiply different keys, and
  // lanes n and n ^ 4 exchange sums, so that each adds those of eight queries.
  static constexpr bool kPairsKeys = Kernel::kPairsKeys;
  static constexpr int kSums = kPairsKeys ? 8 : Dq::kSums;  // that a lane adds

  ATTN_HD explicit QueryGradient(const Work& work) : at_(work.visits) { Open(work); }

  // This block's share of a round of 64 queries. By all warps.
  ATTN_HD void Add(const Work& work, int round, const Places& places, const Shared& shared) {
    if (at_.Begin(work.visits, round)) Open(work);
    const int from_ds = places.dq_ds + (round & (Kernel::kDsBuffers - 1)) * Kernel::kDsBytes;
#pragma unroll 1
    for (int part = 0; part < Kernel::kDqParts; ++part) {
      float rQ[Dq::kSums / 8][8];
      Product(places, from_ds, part, shared, rQ);
      if constexpr (kPairsKeys) {
        float sums[1][8];
        AddPairs(work.lane.column_half(), rQ, sums);
        AddSums(work, round, part, shared, sums);
      } else {
        AddSums(work, round, part, shared, rQ);
      }
    }
    to_ += Dq::kBlockFloats;
    if (!at_.Advance(work.visits)) Open(work);
  }

  // A row that sees an infinite or NaN number of K has 0·∞ or NaN in that column of dQ, whatever
  // its P. Slow and rare; NaN is NaN in any order.
  ATTN_HD static void MarkNonFiniteKeys(const Work& work) {
#pragma unroll 1
    for (int round = 0; round < work.visits.rounds(); ++round) {
      const int head = work.visits.HeadOf(round), row = work.visits.RowOf(round);
#pragma unroll 1
      for (int n = 0; n < kSums * Kernel::kDqParts; ++n) {
        const int part = n / kSums, sum = n % kSums;
        const SumsAt at(work, row, part);
        if (SeesNonFinite(work, head, at.Query(sum), at.Column(sum))) {
          MarkNonFinite(work, head, row, part, sum);
        }
      }
    }
  }

 private:
  // Returns where in the order of Dq's warps this lane's sums of a round are, which starts with
  // `row`. Small tiles' rounds are four of the warps' work, which two do of up to 64 columns; of
  // those warps' lanes short rows need half.
  struct SumsAt {
    int first_row, first_column, warp, lane;
    int first_sum;  // of the lane of Dq
    ATTN_HD SumsAt(const Work& work, int row, int part)
        : first_row(row),
          first_column(part * Dq::kOut),
          warp(work.warp()),
          lane(kPairsKeys ? work.lane.index & ~4 : work.lane.index),
          first_sum(kPairsKeys ? work.lane.column_half() * 8 : 0) {
      if constexpr (Kernel::kSmall) {
        first_row = row & -kDqBlockRows;
        first_column = 0;
        const int chunk = Kernel::kSharesRows       ? warp + 2 * work.lane.column_half()
                          : Kernel::kRoleWarps == 1 ? 2 * warp + part
                                                    : warp;
        warp = (row - first_row) / 8 + chunk;
        if constexpr (Kernel::kSharesRows) lane &= ~4;
      }
    }
    ATTN_HD int Query(int n) const { return first_row + Dq::Query(first_sum + n, warp, lane); }
    ATTN_HD int Column(int n) const { return first_column + Dq::Column(first_sum + n, warp, lane); }
  };
  // The distance from the sums of a part to those of the next.
  static constexpr int kPartFloats = Kernel::kSmall ? Dq::kSums * 32 : Dq::kFloats;

  ATTN_HD void Open(const Work& work) { to_ = Sum(work, at_.head, at_.row(work.visits)); }
  // This lane's first sum of the round that starts with `row`.
  ATTN_HD static float* Sum(const Work& work, int head, int row) {
    const ProblemDesc& p = work.problem;
    const SumsAt at(work, row, 0);
    return p.dq_sums + (int64_t{work.batch} * p.q_heads + head) * p.dq_head +
           int64_t{row / kDqBlockRows} * Dq::kBlockFloats +
           (at.warp * Dq::kSums + at.first_sum) * 32 + at.lane;
  }
  ATTN_HD static int PlaceOfK(const Places& places, int twist, int part) {
    if constexpr (Kernel::kSmall) return places.dq_k ^ twist ^ part * 16;
    return (places.dq_k ^ twist) + part * Dq::kOut * 2;
  }

  // Multiplies one part.
  ATTN_HD static void Product(const Places& places, int from_ds, int part, const Shared& shared,
                              float (&rQ)[Dq::kSums / 8][8]) {
#pragma unroll
    for (int n = 0; n < Dq::kSums / 8; ++n) Float32Accumulate::Zero(rQ[n]);
      // Four keys a product, or twice four. Those 16 keys apart are twisted alike, so that their
      // places differ by constants.
#pragma unroll 1
    for (int n = 0; n < 4; n += kPairsKeys ? 2 : 1) {
      const int twist = (n & 1) * (Twist(4) * 16) ^ (n >> 1) * (Twist(8) * 16);
      const char* ds = Kernel::At(shared.ds(), (from_ds ^ twist) + n * 4 * 128);
      const char* k = Kernel::At(shared.k, PlaceOfK(places, twist, part) + n * 4 * kRowBytes);
#pragma unroll
      for (int far = 0; far < kKeys / 16; ++far) {
        Multiply(ptx::LoadShared128(ds + far * 16 * 128), k + far * 16 * kRowBytes, rQ);
      }
    }
  }
  // A lane keeps the set of queries that its column half names.
  ATTN_HD static void AddPairs(int half, const float (&rQ)[Dq::kSums / 8][8], float (&sums)[1][8]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float got = ptx::ShuffleXor(half ? rQ[0][n] : rQ[1][n], 4);
      sums[0][n] = (half ? rQ[1][n] : rQ[0][n]) + got;
    }
  }

  // Four keys: 8 queries a lane in two sets, times one or two sets of columns.
  ATTN_HD static void Multiply(uint4 a, const char* k, float (&rQ)[Dq::kSums / 8][8]) {
    if constexpr (Dq::kWide) {
      const uint4 b = ptx::LoadShared128(k);
      ptx::MmaColRow(rQ[0], a.x, a.y, b.x, b.y);
      ptx::MmaColRow(rQ[1], a.x, a.y, b.z, b.w);
      ptx::MmaColRow(rQ[2], a.z, a.w, b.x, b.y);
      ptx::MmaColRow(rQ[3], a.z, a.w, b.z, b.w);
    } else {
      const uint2 b = ptx::LoadShared64(k);
      ptx::MmaColRow(rQ[0], a.x, a.y, b.x, b.y);
      ptx::MmaColRow(rQ[1], a.z, a.w, b.x, b.y);
    }
  }

  // The factors of a lane's rows.
  struct Factors {
    uint4 words;
    ATTN_HD Factors(const Work& work, int round, const Shared& shared) {
      const SumsAt at(work, 0, 0);  // as if the round began with row 0
      const int query = Dq::Query(0, at.warp, at.lane);
      words = ptx::LoadShared128(shared.factors[round % Kernel::kFactorRounds] + (query & 32) +
                                 Dq::FactorAt(query & 31));
      if (kPairsKeys && work.lane.column_half()) {
        words.x = words.z;
        words.y = words.w;
      }
    }
    ATTN_HD float Of(int n) const {
      const uint32_t low = Dq::Set(n) ? words.z : words.x, high = Dq::Set(n) ? words.w : words.y;
      return ptx::BitsFloat(n & 2 ? high : low);
    }
  };
  ATTN_HD void AddSums(const Work& work, int round, int part, const Shared& shared,
                       float (&rQ)[kSums / 8][8]) const {
    float* to = to_ + part * kPartFloats;
    if constexpr (Kernel::kFixedPoint) {
      const Factors factors(work, round, shared);
#pragma unroll
      for (int n = 0; n < kSums; ++n) rQ[n >> 3][n & 7] *= factors.Of(n);
      AddFixedPoint(work, part, to, shared, rQ);
    } else {
#pragma unroll
      for (int n = 0; n < kSums; ++n) ptx::ReduceAdd(to + n * 32, rQ[n >> 3][n & 7]);
    }
  }
  // Sums that are not finite are marked instead.
  ATTN_HD void AddFixedPoint(const Work& work, int part, float* to, const Shared& shared,
                             const float (&rQ)[kSums / 8][8]) const {
    float all = ptx::LoadSharedFloat(&shared.watch);
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const float sum = rQ[n >> 3][n & 7];
      ptx::ReduceAdd(reinterpret_cast<int32_t*>(to) + n * 32, ptx::RoundToInt(sum));
      if (n % 2 == 1) all = ptx::Fma(rQ[n >> 3][(n & 7) - 1], sum, all);
    }
    // One rare branch for both.
    if (!(all - all == 0)) {
      if (work.problem.dq_rest != 0) AddRests(work, to, rQ);
      MarkNonFiniteSums(work, part, rQ);
    }
  }
  // Adds the rests of rounding, which are exact, since a float32 beyond 2^23 is an integer.
  ATTN_HD static void AddRests(const Work& work, float* sums, const float (&rQ)[kSums / 8][8]) {
    int32_t* to = reinterpret_cast<int32_t*>(sums) + work.problem.dq_rest;
    const float unit = PowerOfTwo(FixedPoint::RestBits(work.sequence.kv_len));
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const float sum = rQ[n >> 3][n & 7];
      ptx::ReduceAdd(to + n * 32, ptx::RoundToInt((sum - ptx::Round(sum)) * unit));
    }
  }
  ATTN_HD void MarkNonFiniteSums(const Work& work, int part,
                                 const float (&rQ)[kSums / 8][8]) const {
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const float sum = rQ[n >> 3][n & 7];
      if (!(sum - sum == 0)) MarkNonFinite(work, at_.head, at_.row(work.visits), part, n);
    }
  }
  // Marks sum n of the round that starts with `row` as not finite.
  ATTN_HD static void MarkNonFinite(const Work& work, int head, int row, int part, int n) {
    if constexpr (Kernel::kFixedPoint) {
      const SumsAt at(work, row, part);
      const int column = at.Column(n);
      uint32_t* words = DqNonFinite<Kernel::kHeadDim>(work.problem, work.batch, head, at.Query(n));
      ptx::ReduceOr(words + (column >> 5), 1u << (column & 31));
    } else {
      ptx::ReduceAdd(Sum(work, head, row) + part * kPartFloats + n * 32,
                     ptx::BitsFloat(0x7fffffffu));
    }
  }

  ATTN_HD static uint4 KeyChunk(const Work& work, int row, int chunk) {
    const SequenceDesc& s = work.sequence;
    if (work.first_key + row >= s.kv_len || chunk >= work.problem.qk_chunks) {
      return make_uint4(0, 0, 0, 0);
    }
    return ptx::LoadConstant128(
        RowOf(work.problem.k, s.batch, work.kv_head, int64_t{s.kv_begin} + work.first_key + row) +
        chunk * 16);
  }
  ATTN_HD static bool SeesNonFinite(const Work& work, int head, int row, int column) {
    const ScoreContext at = work.At(head);
    MaskLookup mask(work.problem.tile_lists, work.batch, head);
    bool sees = false;
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      const uint4 chunk = KeyChunk(work, key, column >> 3);
      const uint32_t word =
          (column & 4) ? (column & 2 ? chunk.w : chunk.z) : (column & 2 ? chunk.y : chunk.x);
      if (NonFiniteHalves(word) & (column & 1 ? 0xffff0000u : 0xffffu)) {
        sees |= Kernel::ScoreRule::IsVisible(at, mask, row, work.first_key + key);
      }
    }
    return sees;
  }

  float* to_;  // this lane's first sum of the next round
  typename Kernel::Visits::RoundCursor at_;
};

}  // namespace attnd::sm70
