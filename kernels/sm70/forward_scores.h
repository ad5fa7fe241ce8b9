// The score role of a forward block: S = Q·Kᵀ, P and what belongs to a row; of small tiles it also
// brings K. Each of its warps has its rows of Q in registers. `L`: ForwardLayout. Errors: none.
#pragma once

#include "kernels/sm70/forward_layout.h"
#include "kernels/sm70/forward_rows.h"

namespace attnd::sm70 {

template <class L>
class ScoreRole {
 public:
  using Work = typename L::Work;
  using Shared = typename L::Shared;
  static constexpr int kRowTiles = L::kRowTiles;

  // The role's own warps call it.
  ATTN_HD static void Run(Work work, Shared& shared) {
    uint32_t rQ[kRowTiles][L::kChunks * 4];
    LoadQueries(work, rQ);
    OwnRows<L, false> keys(work);
    if constexpr (L::kOwnTiles) keys.Open(work, shared);
    RowState rows;
    Clear(rows);
    const float multiplier = Rule::Multiplier(work.at.problem);
    const int from = ptx::Keep(ChunkOffset(work.lane.OperandKey(), 0, L::kPitch));
    const int to = ptx::Keep(WriterLine(work));
    const int turn = ptx::Keep(L::kTurn + work.team());
    if (work.lane.index < L::kPRing) {
      ptx::StoreShared32(&shared.grown[work.lane.index][work.warp], 0);
    }
    ptx::SyncThreads();  // the first K is there
    for (int step = 0; step < work.tiles.count(); ++step) {
      const auto visit = work.tiles.At(step);
      if (step > 0) ptx::BarrierSync(L::kKeysReady + (step & 1), L::kThreads);
      const MaskWords mask = Masked(work, visit, step);
#pragma unroll L::kUnrolled
      for (int group = 0; group < L::kGroups; ++group) {
        const int slot = (step & 1) * L::kGroups + group;
        float rS[kRowTiles][8];
        ScoresQK(rQ, shared.k, from + (L::kOwnTiles ? group : slot) * L::kGroupBytes, rS);
        ptx::BarrierArrive(turn + group * L::kTeams, L::kTurnThreads);
        if constexpr (L::kOwnTiles) keys.Advance(work, step * L::kGroups + group, shared);
        if constexpr (L::kSplits) Repair(work, visit.First() + group * L::kGroupKeys, rS);
        if (Rule::kEveryTile || visit.IsPartial()) {
          ApplyRule(work, visit, group * L::kGroupKeys, Shown(work, mask, group), rS, rows);
        }
        // Sums of P tell whether a row outgrew its stabiliser: nothing waits for maxima, which are
        // seldom needed.
        Probabilities rP;
        Exponentiate(rS, multiplier, rows, rP);
        if (ptx::VoteAny(Largest(rP.sum) > L::kMostOfP)) {
          Rescale(rS, multiplier, work, step * L::kGroups + group, shared, rows);
          Exponentiate(rS, multiplier, rows, rP);
        }
        AddProbabilities(rP, slot, work, to + slot * L::kTeams * L::kPBytes, shared, rows);
      }
      if (L::FoldsAfter(step)) Fold(rows.sum, rows.total);
      work.tiles.Advance(step, work.thread);  // late: what comes first in a step is waited for
      ptx::BarrierArrive(L::kKeysRead + (step & 1), L::kThreads);
    }
    FinishRows(work, rows, shared);
    ptx::SyncThreads();
  }

 private:
  using Math = typename L::ScoreMath;
  using Rule = typename L::ScoreRule;
  using DropoutPolicy = typename L::Dropout;

  struct RowState {
    float stabilizer[kRowTiles][Math::kRows];
    float sum[kRowTiles][Math::kRows];
    float total[kRowTiles][Math::kRows];  // of split numbers: the sum of earlier steps
    int hidden[kRowTiles][Math::kRows];   // keys that the rule hid, for those that must count them
  };

  ATTN_HD static void LoadQueries(const Work& work, uint32_t (&rQ)[kRowTiles][L::kChunks * 4]) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      int row = MinInt(work.score_row() + m * 16 + work.lane.OperandRow(), s.q_len - 1);
      const char* data = RowOf(problem.q, s.batch, work.at.head, s.q_begin + row);
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (c < problem.qk_chunks) chunk = ptx::LoadConstant128(data + c * 16);
        rQ[m][c * 4] = chunk.x;
        rQ[m][c * 4 + 1] = chunk.y;
        rQ[m][c * 4 + 2] = chunk.z;
        rQ[m][c * 4 + 3] = chunk.w;
      }
    }
  }

  ATTN_HD static void Clear(RowState& rows) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        rows.stabilizer[m][r] = kLowest;
        rows.sum[m][r] = 0;
        rows.total[m][r] = 0;
        rows.hidden[m][r] = 0;
      }
    }
  }

  // `offset`: of this lane's key row, chunk 0, within both slots of K. One LDS.128 is the B operand
  // of two k steps for both row tiles.
  ATTN_HD static void ScoresQK(const uint32_t (&rQ)[kRowTiles][L::kChunks * 4], const void* sK,
                               int offset, float (&rS)[kRowTiles][8]) {
    if constexpr (L::kSplits) {
      SplitScoresQK(rQ, sK, offset, rS);
      return;
    }
    typename Math::Accumulator c[L::kChains][kRowTiles];
#pragma unroll
    for (int m = 0; m < L::kChains * kRowTiles; ++m) Math::Zero(c[m / kRowTiles][m % kRowTiles]);
#pragma unroll
    for (int n = 0; n < L::kChunks; ++n) {
      uint4 b = ptx::LoadShared128(L::At(sK, offset ^ (n & 7) * 16, (n >> 3) * 128));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(c[0][m], rQ[m][n * 4], rQ[m][n * 4 + 1], b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(c[L::kChains - 1][m], rQ[m][n * 4 + 2], rQ[m][n * 4 + 3], b.z, b.w);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Math::ToScores(c[0][m], rS[m]);
      if constexpr (L::kChains == 2) AddChain(c[1][m], rS[m]);
    }
  }
  ATTN_HD static void AddChain(const typename Math::Accumulator& c, float (&rS)[8]) {
    float more[8];
    Math::ToScores(c, more);
#pragma unroll
    for (int e = 0; e < 8; ++e) rS[e] += more[e];
  }

  // The same of split numbers: one LDS.128 is both parts of a k step.
  ATTN_HD static void SplitScoresQK(const uint32_t (&rQ)[kRowTiles][L::kChunks * 4], const void* sK,
                                    int offset, float (&rS)[kRowTiles][8]) {
    constexpr int kLinks = 8;  // of a chain of high products
    float low[kRowTiles][8] = {}, high[kRowTiles][8] = {};
#pragma unroll
    for (int n = 0; n < kRowTiles * 8; ++n) rS[n >> 3][n & 7] = 0;
#pragma unroll
    for (int n = 0; n < L::kChunks; ++n) {
      const uint4 b = ptx::LoadShared128(L::At(sK, offset ^ (n & 7) * 16, (n >> 3) * 128));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(low[m], rQ[m][n * 4 + 2], rQ[m][n * 4 + 3], b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(high[m], rQ[m][n * 4], rQ[m][n * 4 + 1], b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(low[m], rQ[m][n * 4], rQ[m][n * 4 + 1], b.z, b.w);
      }
      if (n % kLinks == kLinks - 1) Fold(high, rS);
    }
    Fold(low, rS);
  }
  // Takes sums to others and begins them anew.
  template <int kCount>
  ATTN_HD static void Fold(float (&from)[kRowTiles][kCount], float (&to)[kRowTiles][kCount]) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kCount; ++n) {
      to[n / kCount][n % kCount] += from[n / kCount][n % kCount];
      from[n / kCount][n % kCount] = 0;
    }
  }
  // Split infinities and NaN are in none of their right places: such scores are made again. [warp]
  ATTN_HD static void Repair(const Work& work, int first_key, float (&rS)[kRowTiles][8]) {
    float all[4] = {};  // short chains: nothing hides their latency
#pragma unroll
    for (int n = 0; n < kRowTiles * 8; ++n)
      all[n & 3] = ptx::Fma(rS[n >> 3][n & 7], 0.0f, all[n & 3]);
    if (!ptx::VoteAny(!(all[0] + all[1] + (all[2] + all[3]) == 0))) return;
    const ProblemDesc& p = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
#pragma unroll 1
    for (int at = 0; at < kRowTiles * 8; ++at) {
      const int row = MinInt(work.score_row() + (at >> 3) * 16 + Math::Row(at & 7, work.lane.index),
                             s.q_len - 1);
      const int key = MinInt(first_key + Math::Col(at & 7, work.lane.index), s.kv_len - 1);
      const char* of_row = RowOf(p.q, s.batch, work.at.head, int64_t{s.q_begin} + row);
      const char* of_key = RowOf(p.k, s.batch, work.at.head / p.group, int64_t{s.kv_begin} + key);
      float sum = 0;
#pragma unroll 1
      for (int c = 0; c < p.qk_chunks; ++c) {
        sum = SplitDot(ptx::LoadConstant128(of_row + c * 16), ptx::LoadConstant128(of_key + c * 16),
                       sum);
      }
#pragma unroll
      for (int n = 0; n < kRowTiles * 8; ++n) {
        float& score = rS[n >> 3][n & 7];
        if (n == at && !(score - score == 0)) score = sum;
      }
    }
  }

  // The lane's scores in pairs: pair 4m + n is of row tile m and the lane's row n % kRows.
  static constexpr int kPairs = 4 * kRowTiles;
  ATTN_HD static void PlacePairs(const Work& work, int first_key, ScorePlace (&pairs)[kPairs]) {
    const int lane = ptx::Keep(work.lane.index);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      pairs[n] = {work.score_row() + L::PlaceOf(n >> 2, n % Math::kRows, {lane}),
                  first_key + Math::Col(PairElement(n & 3), lane)};
    }
  }
  // This lane's bits of a step, under way while the step's first product is made.
  using MaskWords = typename Math::MaskWords;
  template <class Visit>
  ATTN_HD static MaskWords Masked(const Work& work, const Visit& visit, int step) {
    MaskWords words = MaskWords::All();
    if constexpr (Rule::kListed) {
      if (ptx::VoteAny(visit.IsMasked())) {
        const uint32_t* bitmap = work.at.problem.tile_lists.bitmaps +
                                 uint64_t{work.tiles.BitmapAt(step)} * uint32_t{L::kBitmapWords};
        words.Load(bitmap + SquareOf(work.warp * L::kWarpRows, 0, L::kStepKeys), work.lane.index);
      }
    }
    return words;
  }
  // Returns the mask's bits of a group: bit 8m + e of row tile m.
  ATTN_HD static uint32_t Shown(const Work& work, const MaskWords& mask, int group) {
    if constexpr (!Rule::kListed) return ~0u;
    return mask.bits() >> (group * 16 + (kRowTiles == 1 ? (work.warp & 1) * 8 : 0));
  }
  // `first_key`: counted within the tile.
  template <class Visit>
  ATTN_HD static void ApplyRule(const Work& work, const Visit& visit, int first_key, uint32_t shown,
                                float (&rS)[kRowTiles][8], RowState& rows) {
    ScorePlace pairs[kPairs];
    PlacePairs(work, visit.First() + first_key, pairs);
    float scores[kPairs][2], slopes[kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      scores[n][0] = rS[n >> 2][PairElement(n & 3)];
      scores[n][1] = rS[n >> 2][PairElement(n & 3) + 1];
    }
    const uint32_t visible =
        Rule::template ApplyAll<Along::kKeys>(work.at, pairs, visit.IsCut(), shown, scores, slopes);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      rS[n >> 2][PairElement(n & 3)] = scores[n][0];
      rS[n >> 2][PairElement(n & 3) + 1] = scores[n][1];
    }
    if (Rule::kEveryTile && ptx::VoteAny(visible != kAllScores<kPairs>)) Hide(~visible, rS, rows);
  }
  // `hidden`: bit 8m + 2·(pair of row tile m) + n.
  ATTN_HD static void Hide(uint32_t hidden, float (&rS)[kRowTiles][8], RowState& rows) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (hidden >> (8 * m + n) & 1) rS[m][PairElement(n >> 1) + (n & 1)] = -Infinity();
      }
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        const uint32_t of_row = Math::kRows == 1 ? 0xffu : 0x33u << (2 * r);
        rows.hidden[m][r] += ptx::CountBits(hidden & of_row << (8 * m));
      }
    }
  }
  ATTN_HD static constexpr int PairElement(int n) {
    return Math::Element(n % Math::kRows, n / Math::kRows * 2);
  }

  // The probabilities of a group: float16 words by row (float16 accumulators: pair of keys) and k
  // step, the low parts of split numbers, and this lane's part of each row's sum.
  struct Probabilities {
    uint32_t words[kRowTiles][2][2], low[kRowTiles][2][2];
    float sum[kRowTiles][Math::kRows];
  };
  ATTN_HD static void Exponentiate(const float (&rS)[kRowTiles][8], float multiplier,
                                   const RowState& rows, Probabilities& rP) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float p[8];
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < Math::kColumns; ++c) {
          const int e = Math::Element(r, c);
          p[e] = ptx::Exp2(ptx::Fma(rS[m][e], multiplier, -rows.stabilizer[m][r]));
        }
        const int e = Math::Element(r, 0), f = Math::Element(r, 2);
        rP.sum[m][r] = p[e] + p[e + 1] + (p[f] + p[f + 1]);
        if constexpr (Math::kRows == 1) rP.sum[m][r] += p[4] + p[5] + (p[6] + p[7]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int e = 2 * (n >> 1) + 4 * (n & 1);
        if constexpr (L::kSplits) {
          const SplitPair split = SplitNumbers(p[e], p[e + 1]);
          rP.words[m][n >> 1][n & 1] = split.high;
          rP.low[m][n >> 1][n & 1] = split.low;
        } else {
          rP.words[m][n >> 1][n & 1] = ptx::PackTruncated(p[e], p[e + 1]);
        }
      }
    }
  }
  ATTN_HD static float Largest(const float (&sum)[kRowTiles][Math::kRows]) {
    float largest = sum[0][0];
#pragma unroll
    for (int n = 1; n < kRowTiles * Math::kRows; ++n) {
      largest = ptx::Max(largest, sum[n / Math::kRows][n % Math::kRows]);
    }
    return largest;
  }

  // Moves the stabilisers: some row of the warp outgrew its own.
  ATTN_HD static void Rescale(const float (&rS)[kRowTiles][8], float multiplier, const Work& work,
                              int group, Shared& shared, RowState& rows) {
    const int slot = group & (L::kPRing - 1);
    const Lane lane = {ptx::Keep(work.lane.index)};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        float largest = rS[m][Math::Element(r, 0)];
#pragma unroll
        for (int c = 1; c < Math::kColumns; ++c) {
          largest = ptx::Max(largest, rS[m][Math::Element(r, c)]);
        }
        float target = Math::RowMax(largest) * multiplier - L::kBias;
        float stabilizer = ptx::Max(target, rows.stabilizer[m][r]);
        float factor = ptx::Exp2(rows.stabilizer[m][r] - stabilizer);
        rows.stabilizer[m][r] = stabilizer;
        rows.sum[m][r] *= factor;
        if constexpr (L::kSplits) rows.total[m][r] *= factor;
        bool is_writer = Math::Col(0, lane.index) == 0;
        float* place = &shared.factor[slot][work.warp][L::PlaceOf(m, r, lane)];
        if (is_writer) ptx::StoreSharedFloat(place, factor);
      }
    }
    if (lane.index == 0) ptx::StoreShared32(&shared.grown[slot][work.warp], group + 1);
  }

  // `slot`: of the group in the ring of K. `offset`: of this lane's line in P's. A row's line holds
  // keys (0 1)(8 9)(2 3)(10 11) of its column half, counted within the group's 16: the first two
  // words are the A operand of k step 0, the others of k step 1.
  ATTN_HD static void AddProbabilities(Probabilities& rP, int slot, const Work& work, int offset,
                                       Shared& shared, RowState& rows) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) rows.sum[m][r] += rP.sum[m][r];
      const auto keep = DropoutPolicy::Load(shared.keep, slot, work.warp, m, work.lane.index);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t mask = DropoutPolicy::Mask(keep, n >> 1, n & 1);
        rP.words[m][n >> 1][n & 1] &= mask;
        if constexpr (L::kSplits) rP.low[m][n >> 1][n & 1] &= mask;
      }
      const int line = offset + m * L::kLineTileBytes;
      StoreLines(rP.words[m], shared.p, line);
      if constexpr (L::kSplits) StoreLines(rP.low[m], shared.p, line + L::kPartBytes);
    }
  }
  ATTN_HD static void StoreLines(const uint32_t (&words)[2][2], void* sP, int offset) {
    if constexpr (Math::kRows == 2) {
      ptx::StoreShared64(L::At(sP, offset, 0), make_uint2(words[0][0], words[0][1]));
      ptx::StoreShared64(L::At(sP, offset ^ L::kSecondRow, 0),
                         make_uint2(words[1][0], words[1][1]));
    } else {
      ptx::StoreShared128(L::At(sP, offset, 0),
                          make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]));
    }
  }

  // Tells whether the loop leaves it to the end to count what rows see.
  static constexpr bool kCountsLate = Rule::kListed && !Rule::kEveryTile;

  ATTN_HD static void FinishRows(const Work& work, RowState& rows, Shared& shared) {
    if constexpr (L::kSplits) Fold(rows.total, rows.sum);
    bool empty = false;  // whether some row may have seen nothing
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        rows.sum[m][r] = Math::RowSum(rows.sum[m][r]);
        empty |= rows.sum[m][r] == 0;
      }
    }
    bool counted = false;
    if constexpr (kCountsLate) {
      counted = work.at.problem.denominator == kDenominatorZeroRest || ptx::VoteAny(empty);
      if (counted) CountKeys(work, shared.end_factor);
    }
    RowEnd ends[kRowTiles][Math::kRows];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        const int place = L::PlaceOf(m, r, work.lane);
        int seen = 1;  // at least
        if constexpr (Rule::kEveryTile) {
          seen = work.tiles.count() * L::kStepKeys -
                 static_cast<int>(Math::RowSum(static_cast<float>(rows.hidden[m][r])));
        }
        if (counted) {
          seen = static_cast<int>(
              ptx::LoadShared32(&shared.end_factor[work.warp * L::kWarpRows + place]));
        }
        ends[m][r] = FinishRow(work.at, L::kGain, rows.stabilizer[m][r], rows.sum[m][r],
                               Rule::VisibleCount(work.at, work.score_row() + place, seen));
      }
    }
    if (counted) ptx::SyncWarp();
    WriteRows(work, ends, shared);
  }
  ATTN_HD static void WriteRows(const Work& work, const RowEnd (&ends)[kRowTiles][Math::kRows],
                                Shared& shared) {
    float* lse = L::LseOf(work);
    const int q_len = work.at.sequence.q_len;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        const int place = L::PlaceOf(m, r, work.lane), row = work.score_row() + place;
        bool is_writer = Math::Col(0, work.lane.index) == 0;
        if (is_writer) {
          ptx::StoreSharedFloat(&shared.end_factor[work.warp * L::kWarpRows + place],
                                ends[m][r].factor);
        }
        if (is_writer && row < q_len) ptx::StoreGlobalFloat(lse + row, ends[m][r].lse);
      }
    }
  }

  // Leaves in `places`, those of end_factor, how many keys each row of the warp sees, a row a lane.
  // Slow, and only where something asks for it: zero_rest, or a row that may see nothing.
  ATTN_HD static void CountKeys(const Work& work, float* places) {
    const int place = work.warp * L::kWarpRows + (work.lane.index & (L::kWarpRows - 1));
    const int row = work.block_row + place;
    const Range keys = VisibleKeys(VisibilityOf(work.at.sequence), row, row + 1);
    const ListedTiles& tiles = work.tiles.tiles();
    int seen = 0;
#pragma unroll 1
    for (int n = 0; n < tiles.count(); n += kCounted) {
      uint32_t listed[kCounted], bits[kCounted];
#pragma unroll
      for (int k = 0; k < kCounted; ++k) listed[k] = tiles.Load(MinInt(n + k, tiles.count() - 1));
      LoadRow(work, place, listed, bits);
#pragma unroll
      for (int k = 0; k < kCounted; ++k) {
        const int first = tiles.Visit(listed[k]).First();
        const uint32_t inside = BitsFrom(keys.begin - first) & ~BitsFrom(keys.end - first);
        if (n + k < tiles.count()) seen += ptx::CountBits(bits[k] & inside);
      }
    }
    if (work.lane.index < L::kWarpRows) {
      ptx::StoreShared32(&places[work.warp * L::kWarpRows + work.lane.index],
                         static_cast<uint32_t>(seen));
    }
    ptx::SyncWarp();
  }
  static constexpr int kCounted = 4;  // visits whose loads are under way at once
  // Bits from `n` on.
  ATTN_HD static uint32_t BitsFrom(int n) { return n >= 32 ? 0 : ~0u << MaxInt(0, n); }
  // The keys that the mask shows row `place` of the block, of each visit.
  ATTN_HD static void LoadRow(const Work& work, int place, const uint32_t (&listed)[kCounted],
                              uint32_t (&bits)[kCounted]) {
    const ListedTiles& tiles = work.tiles.tiles();
    const uint32_t* squares = work.at.problem.tile_lists.bitmaps + SquareOf(place, 0, L::kStepKeys);
    uint32_t words[kCounted][4];
#pragma unroll
    for (int k = 0; k < kCounted; ++k) {
      const uint32_t* square = squares + int64_t{tiles.Bitmap(listed[k])} * L::kBitmapWords;
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        words[k][y] = ~0u;
        ptx::LoadConstant32If(words[k][y], square + MaskWordOf<kLanesOfSm70>::LaneOf(place, 2 * y),
                              tiles.Visit(listed[k]).IsMasked());
      }
    }
#pragma unroll
    for (int k = 0; k < kCounted; ++k) {
      bits[k] = MaskWordOf<kLanesOfSm70>::AlongY(place, [&](int y) { return words[k][y / 2]; });
    }
  }

  // Byte offsets within slot 0 of P, row tile 0: where this lane writes.
  ATTN_HD static int WriterLine(const Work& work) {
    const Lane lane = work.lane;
    const int row = Math::kRows == 2 ? lane.index & 1 : lane.quad();
    const int half_line = Math::kRows == 2 ? (lane.index & 2) * 4 : 0;
    return work.team() * L::kPBytes + work.part() * L::kLineTileBytes + half_line +
           L::Line(row, lane.row_half(), lane.upper(), lane.column_half()) * 16;
  }
};

}  // namespace attnd::sm70
