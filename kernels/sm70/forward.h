// Exact attention for one tile of 128 queries (64 of wide heads), in one pass over K and V.
//   S = scale·Q·Kᵀ, masked      P = softmax(S)      O = (P∘Z)·V      lse = m + log(l)
// Roles: warps 0-3 make scores and probabilities (Q in registers), warps 4-7 the output (O in
// registers). A team of one of each works on the same 32 queries; where a row of O is too long for
// one warp's registers, a team is two of each: a score warp has 16 of the queries, an output warp
// half of the columns. Warps w and w + 4 share a sub-core, so softmax runs under the other's
// products. A step handles 32 keys in two groups of 16; output warps lag one group behind.
//
// P reaches its reader as A operand through shared memory: two STS.64 (or one STS.128) a lane, one
// LDS.128, no shuffles. When a group's scores outgrow the stabiliser by 2^8 (one vote, rare after
// the first steps), row factors follow the same way and O is rescaled.
// Inputs    float16; rows as kernels/params.h says. Errors: none.
// Rows      with no visible key give O = 0 and lse = −inf. What an invisible V row holds never
//           reaches O: on their way in, rows beyond the sequence and, in PARTIAL tiles, infinities
//           and NaN become zero; RestoreNonFinite puts them into O where they are visible.
// Source    Dao 2023 (FlashAttention-2), Algorithm 1; docs/KERNELS.md has figures and what lost.
#pragma once

#include "attention/dropout.h"
#include "kernels/online_softmax.h"
#include "kernels/sm70/dropout.h"
#include "kernels/sm70/forward_visits.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

template <TileMath Math, Tile kTile, class Rule, class Dropper>
struct ForwardKernel {
  static constexpr int kThreads = 256;
  static constexpr int kRoleWarps = 4;
  static constexpr int kRowTiles = kTile.q_rows / (16 * kRoleWarps);  // of a score warp, 16 rows
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kTeamTiles = 2, kTeamRows = 16 * kTeamTiles;
  static constexpr int kTeamWarps = kTeamTiles / kRowTiles;  // of each role
  static constexpr int kTeams = kRoleWarps / kTeamWarps;
  static constexpr int kStepKeys = 32, kGroupKeys = 16, kGroups = 2;
  static_assert((kRowTiles == 1 || kRowTiles == 2) && kTile.kv_rows == kStepKeys);

  // 16-byte chunks of a row: what is multiplied, what an output warp has of them, and how far rows
  // stand apart in shared memory (whole 128-byte lines, a power of two).
  static constexpr int kChunks = kTile.head_dim / 8, kOutputChunks = kChunks / kTeamWarps;
  static constexpr int kPitch = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static_assert(kOutputChunks % 4 == 0);

  // Groups of 16 keys go round in rings: two steps of K, three of V, four groups of P.
  static constexpr int kKeyRing = 4, kValueRing = 6, kPRing = 4;
  static constexpr int kGroupBytes = kGroupKeys * kPitch * 16;
  static constexpr int kTileBytes = kGroups * kGroupBytes;
  static constexpr int kLineTileBytes = 32 * 16;               // lines of one 16×16 tile of P
  static constexpr int kPBytes = kTeamTiles * kLineTileBytes;  // of a team
  using Words = typename Dropper::template Words<kRowTiles>;
  using Visits = KeyVisits<Rule, kStepKeys>;
  struct alignas(128) Shared {
    uint4 k[kKeyRing * kGroupKeys * kPitch];
    uint4 v[kValueRing * kGroupKeys * kPitch];
    uint4 p[kPRing][kTeams][kTeamTiles][32];  // lines of P, see Line
    float factor[kPRing][kRoleWarps][kWarpRows];
    // 1 + the last group of this slot for which a score warp wrote factor.
    int grown[kPRing][kRoleWarps];
    float end_factor[kRoleWarps * kWarpRows];
    Words keep;
    Descriptors descriptors;
    int left_out;  // whether an infinity or NaN of a PARTIAL tile of V was left out
    typename Visits::Ring visits;
  };
  static_assert(sizeof(Shared) * kTile.blocks_per_sm <= 96 * 1024, "Volta has 96 KiB an SM");

  // Named barriers. Turn: a team's score warps have made their products of one group, so the P of
  // the group before is complete and the tensor cores are free for its output warps (by parity of
  // the group). KeysReady: a step's K is there, and output warps are at most one group behind.
  // KeysRead: all of a step's K has been read, and all output warps are done with the step before.
  // Arriving does not wait, so scores never wait for the output of their own step; since a warp may
  // then arrive for the next step before others have met for this one, both alternate by step.
  static constexpr int kTurn = 1, kKeysReady = kTurn + 2 * kTeams, kKeysRead = kKeysReady + 2,
                       kOutputOnly = kKeysRead + 2;
  static constexpr int kTurnThreads = 64 * kTeamWarps;

  // What both roles know.
  struct Work {
    ScoreContext at;
    Visits tiles;
    int block_row;  // the block's first
    Lane lane;
    int warp, thread;  // within the role
    ATTN_HD int team() const { return warp / kTeamWarps; }
    ATTN_HD int part() const { return warp % kTeamWarps; }  // of a team
    ATTN_HD int score_row() const { return block_row + warp * kWarpRows; }
    ATTN_HD int team_row() const { return block_row + team() * kTeamRows; }
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) ptx::StoreShared32(&shared.left_out, 0);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    const SequenceDesc& sequence = shared.descriptors.sequence;
    int first_row = tile.tile * kTile.q_rows;
    int end_row = MinInt(first_row + kTile.q_rows, sequence.q_len);
    Work work = {{problem, sequence, tile.batch, tile.head, Rule::OptionsOf(problem)},
                 Visits(problem, sequence, tile, first_row, end_row, shared.visits),
                 first_row,
                 {at.thread & 31},
                 (at.thread >> 5) & (kRoleWarps - 1),
                 at.thread & (kStageThreads - 1)};
    work.tiles.Open(at.thread);
    if (work.tiles.count() == 0) {
      WriteEmptyRows(work, at.thread < kStageThreads);
    } else if (at.thread < kStageThreads) {
      MakeScores(work, shared);
    } else {
      MakeOutput(work, shared);
    }
  }

 private:
  // ---- Both roles.
  ATTN_HD static const char* RowsOf(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
    return static_cast<const char*>(t.data) +
           2 * (batch * t.batch + head * t.head + row * t.row_stride);
  }
  ATTN_HD static RowStager<kPitch> Stager(const Work& work, const RowTensor& t, int live_chunks) {
    const SequenceDesc& s = work.at.sequence;
    int kv_head = work.at.head / work.at.problem.group;
    return RowStager<kPitch>(RowsOf(t, s.batch, kv_head, s.kv_begin),
                             static_cast<int>(t.row_stride * 2), s.kv_len, live_chunks,
                             work.thread);
  }
  ATTN_HD static int NextFetch(const Work& work, int step) {
    return work.tiles.At(MinInt(step, work.tiles.count() - 1)).First();
  }
  ATTN_HD static float* LseOf(const Work& work) {
    const SequenceDesc& s = work.at.sequence;
    const ProblemDesc& problem = work.at.problem;
    return problem.lse + s.batch * problem.lse_batch + work.at.head * problem.lse_head + s.q_begin;
  }

  // ---- Score role: S = Q·Kᵀ, P, row statistics.
  struct RowState {
    float stabilizer[kRowTiles][Math::kRows];
    float sum[kRowTiles][Math::kRows];
    int hidden[kRowTiles][Math::kRows];  // keys that the rule hid, for those that must count them
  };

  ATTN_HD static void MakeScores(const Work& work, Shared& shared) {
    uint32_t rQ[kRowTiles][kChunks * 4];
    LoadQueries(work, rQ);
    RowState rows;
    Clear(rows);
    const float multiplier = Rule::Multiplier(work.at.problem);
    const int from = ptx::Keep(ChunkOffset(work.lane.OperandKey(), 0, kPitch));
    const int to = ptx::Keep(WriterLine(work));
    const int turn = ptx::Keep(kTurn + work.team());
    if (work.lane.index < kPRing) {
      ptx::StoreShared32(&shared.grown[work.lane.index][work.warp], 0);
    }
    ptx::SyncThreads();  // the first K is there
    for (int step = 0; step < work.tiles.count(); ++step) {
      if (step > 0) ptx::BarrierSync(kKeysReady + (step & 1), kThreads);
      const auto visit = work.tiles.At(step);
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const int slot = (step & 1) * kGroups + group;
        float rS[kRowTiles][8];
        ScoresQK(rQ, shared.k, from + slot * kGroupBytes, rS);
        ptx::BarrierArrive(turn + group * kTeams, kTurnThreads);
        if (Rule::kEveryTile || visit.IsPartial()) {
          ApplyRule(work, visit, group * kGroupKeys, rS, rows);
        }
        Grow(rS, multiplier, work, step * kGroups + group, shared, rows);
        MakeProbabilities(rS, multiplier, slot, work, rows, shared, to + slot * kTeams * kPBytes);
      }
      ptx::BarrierArrive(kKeysRead + (step & 1), kThreads);
    }
    FinishRows(work, rows, shared);
    ptx::SyncThreads();
  }

  ATTN_HD static void LoadQueries(const Work& work, uint32_t (&rQ)[kRowTiles][kChunks * 4]) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      int row = MinInt(work.score_row() + m * 16 + work.lane.OperandRow(), s.q_len - 1);
      const char* data = RowsOf(problem.q, s.batch, work.at.head, s.q_begin + row);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
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
        rows.hidden[m][r] = 0;
      }
    }
  }

  // `offset`: of this lane's key row, chunk 0, within both slots of K. One LDS.128 is the B operand
  // of two k steps for both row tiles.
  ATTN_HD static void ScoresQK(const uint32_t (&rQ)[kRowTiles][kChunks * 4], const void* sK,
                               int offset, float (&rS)[kRowTiles][8]) {
    typename Math::Accumulator c[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) Math::Zero(c[m]);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      uint4 b = ptx::LoadShared128(At(sK, offset ^ (n & 7) * 16, (n >> 3) * 128));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(c[m], rQ[m][n * 4], rQ[m][n * 4 + 1], b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::Multiply(c[m], rQ[m][n * 4 + 2], rQ[m][n * 4 + 3], b.z, b.w);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) Math::ToScores(c[m], rS[m]);
  }
  ATTN_HD static const char* At(const void* base, int offset, int constant) {
    return static_cast<const char*>(base) + offset + constant;
  }
  ATTN_HD static char* At(void* base, int offset, int constant) {
    return static_cast<char*>(base) + offset + constant;
  }

  // The lane's scores in pairs: pair 4m + n is of row tile m and the lane's row n % kRows.
  static constexpr int kPairs = 4 * kRowTiles;
  ATTN_HD static void PlacePairs(const Work& work, int first_key, ScorePlace (&pairs)[kPairs]) {
    const int lane = ptx::Keep(work.lane.index);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      pairs[n] = {work.score_row() + PlaceOf(n >> 2, n % Math::kRows, {lane}),
                  first_key + Math::Col(PairElement(n & 3), lane)};
    }
  }
  // `first_key`: counted within the tile.
  template <class Visit>
  ATTN_HD static void ApplyRule(const Work& work, const Visit& visit, int first_key,
                                float (&rS)[kRowTiles][8], RowState& rows) {
    ScorePlace pairs[kPairs];
    PlacePairs(work, visit.First() + first_key, pairs);
    float scores[kPairs][2], slopes[kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      scores[n][0] = rS[n >> 2][PairElement(n & 3)];
      scores[n][1] = rS[n >> 2][PairElement(n & 3) + 1];
    }
    ScoreContext at = work.at;
    at.options = Rule::OptionsIn(at.options, visit.IsMasked());
    const uint32_t visible =
        Rule::template ApplyAll<Along::kKeys>(at, pairs, visit.IsCut(), scores, slopes);
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

  // Moves the stabilisers if any row of the warp outgrew its own by 2^kLag.
  ATTN_HD static void Grow(const float (&rS)[kRowTiles][8], float multiplier, const Work& work,
                           int group, Shared& shared, RowState& rows) {
    float largest[kRowTiles][Math::kRows];
    float excess = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        float x = rS[m][Math::Element(r, 0)];
#pragma unroll
        for (int c = 1; c < Math::kColumns; ++c) x = ptx::Max(x, rS[m][Math::Element(r, c)]);
        largest[m][r] = x;
        float over = ptx::Fma(x, multiplier, -rows.stabilizer[m][r]);
        excess = m + r == 0 ? over : ptx::Max(excess, over);
      }
    }
    if (ptx::VoteAny(excess > kLag)) Rescale(largest, multiplier, work, group, shared, rows);
  }

  ATTN_HD static void Rescale(const float (&largest)[kRowTiles][Math::kRows], float multiplier,
                              const Work& work, int group, Shared& shared, RowState& rows) {
    const int slot = group & (kPRing - 1);
    const Lane lane = {ptx::Keep(work.lane.index)};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        float target = Math::RowMax(largest[m][r]) * multiplier - kTruncationBias;
        float stabilizer = ptx::Max(target, rows.stabilizer[m][r]);
        float factor = ptx::Exp2(rows.stabilizer[m][r] - stabilizer);
        rows.stabilizer[m][r] = stabilizer;
        rows.sum[m][r] *= factor;
        bool is_writer = Math::Col(0, lane.index) == 0;
        float* place = &shared.factor[slot][work.warp][PlaceOf(m, r, lane)];
        if (is_writer) ptx::StoreSharedFloat(place, factor);
      }
    }
    if (lane.index == 0) ptx::StoreShared32(&shared.grown[slot][work.warp], group + 1);
  }

  // `slot`: of the group in the ring of K. `offset`: of this lane's line in P's.
  ATTN_HD static void MakeProbabilities(const float (&rS)[kRowTiles][8], float multiplier, int slot,
                                        const Work& work, RowState& rows, Shared& shared,
                                        int offset) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float rP[8];
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < Math::kColumns; ++c) {
          const int e = Math::Element(r, c);
          rP[e] = ptx::Exp2(ptx::Fma(rS[m][e], multiplier, -rows.stabilizer[m][r]));
          rows.sum[m][r] += rP[e];
        }
      }
      StoreP(rP, Dropper::Load(shared.keep, slot, work.warp, m, work.lane.index), shared.p,
             offset + m * kLineTileBytes);
    }
  }

  // A row's line holds keys (0 1)(8 9)(2 3)(10 11) of its column half, counted within the group's
  // 16: the first two words are the A operand of k step 0, the others of k step 1.
  ATTN_HD static void StoreP(const float (&rP)[8], typename Dropper::Keep keep, void* sP,
                             int offset) {
    uint32_t words[2][2];  // row (float16 accumulators: pair of keys), k step
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int e = 2 * r + 4 * k;
        words[r][k] = ptx::PackTruncated(rP[e], rP[e + 1]) & Dropper::Mask(keep, r, k);
      }
    }
    if constexpr (Math::kRows == 2) {
      ptx::StoreShared64(At(sP, offset, 0), make_uint2(words[0][0], words[0][1]));
      ptx::StoreShared64(At(sP, offset ^ kSecondRow, 0), make_uint2(words[1][0], words[1][1]));
    } else {
      ptx::StoreShared128(At(sP, offset, 0),
                          make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]));
    }
  }

  // The 16-byte line of P that belongs to row `row` (0..3) of a quad-pair's half and to `half` of
  // the columns. No bank conflicts, written by halves or read whole.
  ATTN_HD static constexpr int Line(int row, int row_half, int upper, int half) {
    return (row & 1) | half << 1 | (row_half ^ (row >> 1)) << 2 | (row >> 1) << 3 | upper << 4;
  }
  static constexpr int kSecondRow = Line(2, 0, 0, 0) * 16;  // offset ^ this: the lane's second row
  static constexpr int kOtherHalf = Line(0, 0, 0, 1) * 16;  // offset ^ this: the other columns
  // Byte offsets within slot 0 of P, row tile 0: where this lane writes, and what it reads.
  ATTN_HD static int WriterLine(const Work& work) {
    const Lane lane = work.lane;
    const int row = Math::kRows == 2 ? lane.index & 1 : lane.quad();
    const int half_line = Math::kRows == 2 ? (lane.index & 2) * 4 : 0;
    return work.team() * kPBytes + work.part() * kLineTileBytes + half_line +
           Line(row, lane.row_half(), lane.upper(), lane.column_half()) * 16;
  }
  ATTN_HD static int ReaderLine(const Work& work) {
    const Lane lane = work.lane;
    return work.team() * kPBytes +
           Line(lane.quad(), lane.row_half(), lane.upper(), lane.column_half()) * 16;
  }

  ATTN_HD static void FinishRows(const Work& work, RowState& rows, Shared& shared) {
    float* lse = LseOf(work);
    const int q_len = work.at.sequence.q_len;
    const int visited = work.tiles.count() * kStepKeys;
    RowEnd ends[kRowTiles][Math::kRows];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        float sum = Math::RowSum(rows.sum[m][r]);
        const int hidden = static_cast<int>(Math::RowSum(static_cast<float>(rows.hidden[m][r])));
        const int row = work.score_row() + PlaceOf(m, r, work.lane);
        ends[m][r] = FinishRow(work.at, rows.stabilizer[m][r], sum,
                               Rule::VisibleCount(work.at, row, visited - hidden));
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < Math::kRows; ++r) {
        const int place = PlaceOf(m, r, work.lane), row = work.score_row() + place;
        bool is_writer = Math::Col(0, work.lane.index) == 0;
        if (is_writer) {
          ptx::StoreSharedFloat(&shared.end_factor[work.warp * kWarpRows + place],
                                ends[m][r].factor);
        }
        if (is_writer && row < q_len) ptx::StoreGlobalFloat(lse + row, ends[m][r].lse);
      }
    }
  }
  // Row of the score warp's that this lane's r-th row of tile m is.
  ATTN_HD static int PlaceOf(int m, int r, Lane lane) {
    return m * 16 + Math::Row(Math::Element(r, 0), lane.index);
  }

  // ---- Output role: O = P·V.
  static constexpr int kOutputTiles = kOutputChunks / 2;
  using OutputTiles = float[kTeamTiles][kOutputTiles][8];

  ATTN_HD static void MakeOutput(Work work, Shared& shared) {
    OutputTiles rO;
#pragma unroll
    for (int m = 0; m < kTeamTiles; ++m) {
#pragma unroll
      for (int x = 0; x < kOutputTiles; ++x) Float32Accumulate::Zero(rO[m][x]);
    }
    Stagers stagers = {Stager(work, work.at.problem.k, work.at.problem.qk_chunks),
                       Stager(work, work.at.problem.v, work.at.problem.v_chunks)};
    const int count = work.tiles.count();
    stagers.Fetch(work, 0);
    PutTiles(work, stagers, 0, 0, shared);
    stagers.Fetch(work, 1);
    Dropper dropper(work.at, work.score_row(), work.lane.index);
    int words = ptx::Keep(work.warp * Words::kWarp + work.lane.index * 8);
    dropper.template Store<kRowTiles>(At(&shared.keep, words, 0), work.tiles.At(0).First());
    Operands operands(work);
    const int turn = ptx::Keep(kTurn + work.team());
    ptx::SyncThreads();
    int put = kTileBytes;  // where the next step's V goes in its ring
    for (int step = 0; step <= count; ++step) {
      if (step > 0) ptx::BarrierSync(kKeysRead + ((step - 1) & 1), kThreads);
      words ^= Words::kStep;
      if (step + 1 < count) {
        PutTiles(work, stagers, step + 1, put, shared);
        dropper.template Store<kRowTiles>(At(&shared.keep, words, 0),
                                          work.tiles.At(step + 1).First());
      }
      work.tiles.Advance(step, work.thread);
      put = put == (kValueRing - kGroups) * kGroupBytes ? 0 : put + kTileBytes;
      stagers.Fetch(work, step + 2);
      // The last group of the step before, then the first of this one.
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        if (step < count) ptx::BarrierSync(turn + n * kTeams, kTurnThreads);
        if (n == 1 && step + 1 < count) {
          ptx::BarrierArrive(kKeysReady + ((step + 1) & 1), kThreads);
        }
        const int group = 2 * step + n - 1;
        if (group >= 0 && group < 2 * count) AddGroup(work, group, operands, shared, rO);
      }
    }
    ptx::SyncThreads();  // end_factor is there
    WriteOutput(work, shared, rO);
    if (ptx::LoadShared32(&shared.left_out)) {
      ptx::BarrierSync(kOutputOnly, kStageThreads);  // all of the block's O is written
      RestoreNonFinite(work);
    }
  }

  struct Stagers {
    RowStager<kPitch> k, v;
    ATTN_HD void Fetch(const Work& work, int step) {
      int first = NextFetch(work, step);
      k.Fetch(first);
      v.Fetch(first);
    }
  };

  ATTN_HD static void PutTiles(const Work& work, const Stagers& stagers, int step, int value_offset,
                               Shared& shared) {
    stagers.k.Put(shared.k, (step & 1) * kTileBytes);
    const auto visit = work.tiles.At(step);
    if (!visit.IsPartial()) {
      stagers.v.Put(shared.v, value_offset);
      return;
    }
    if (stagers.v.template PutFinite<Rule::kEveryTile>(shared.v, value_offset, visit.First())) {
      ptx::StoreShared32(&shared.left_out, 1);
    }
  }

  static constexpr int kOtherKeys = ChunkOffset(4, 0, kPitch);  // four rows on, twist included
  // Byte offsets of this lane's operands of the group at hand.
  struct Operands {
    int line;  // of P: the own column half's keys; ^ kOtherHalf: the other's
    int row;   // of V, within the group: key of k step 0, the lane's chunk; ^ kOtherKeys likewise
    int p, v;  // of the group in the rings

    ATTN_HD explicit Operands(const Work& work) : p(0), v(0) {
      const int chunk = work.lane.column_half() * 2 + work.lane.upper();
      line = ptx::Keep(ReaderLine(work));
      const int column = work.part() * kOutputChunks * 16;
      row = ptx::Keep(ChunkOffset(work.lane.ValueKey(0, 0), chunk, kPitch) + column);
    }
    ATTN_HD void Next() {
      p = (p + kTeams * kPBytes) & (kPRing * kTeams * kPBytes - 1);
      v = v == (kValueRing - 1) * kGroupBytes ? 0 : v + kGroupBytes;
    }
  };

  ATTN_HD static void AddGroup(const Work& work, int group, Operands& at, const Shared& shared,
                               OutputTiles& rO) {
    const int slot = group & (kPRing - 1);
#pragma unroll
    for (int n = 0; n < kTeamWarps; ++n) {
      const int warp = work.team() * kTeamWarps + n;
      if (ptx::LoadShared32(&shared.grown[slot][warp]) == static_cast<uint32_t>(group + 1)) {
        RescaleOutput(shared.factor[slot][warp], n * kRowTiles, {ptx::Keep(work.lane.index)}, rO);
      }
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      AddPV(shared.p, at.p + at.line, shared.v, at.v + at.row, rO);
      at.line ^= kOtherHalf;
      at.row ^= kOtherKeys;
    }
    at.Next();
  }

  // Eight keys of each column half: `line` of P, `row` of V as byte offsets.
  ATTN_HD static void AddPV(const void* sP, int line, const void* sV, int row, OutputTiles& rO) {
    uint4 a[kTeamTiles];
#pragma unroll
    for (int m = 0; m < kTeamTiles; ++m) {
      a[m] = ptx::LoadShared128(At(sP, line, m * kLineTileBytes));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int n = 0; n < kOutputChunks / 4; ++n) {
        // k step 1 is two rows on, which twists by two chunks; n two steps of four chunks.
        const int twist = ((n & 1) * 4) ^ (k * 2);
        uint4 b =
            ptx::LoadShared128(At(sV, row ^ twist * 16, (n >> 1) * 128 + k * 2 * kPitch * 16));
#pragma unroll
        for (int m = 0; m < kTeamTiles; ++m) {
          ptx::MmaRowRow(rO[m][2 * n], k ? a[m].z : a[m].x, k ? a[m].w : a[m].y, b.x, b.y);
        }
#pragma unroll
        for (int m = 0; m < kTeamTiles; ++m) {
          ptx::MmaRowRow(rO[m][2 * n + 1], k ? a[m].z : a[m].x, k ? a[m].w : a[m].y, b.z, b.w);
        }
      }
    }
  }

  // The tiles of one score warp, from `first_tile` on.
  ATTN_HD static void RescaleOutput(const float* factor, int first_tile, Lane lane,
                                    OutputTiles& rO) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = Float32Accumulate::Row(2 * r, lane.index);
        float f = ptx::LoadSharedFloat(&factor[m * 16 + row]);
#pragma unroll
        for (int x = 0; x < kOutputTiles; ++x) {
#pragma unroll
          for (int c = 0; c < 4; ++c) rO[first_tile + m][x][Float32Accumulate::Element(r, c)] *= f;
        }
      }
    }
  }

  // Chunk of O's row that element e of tile x lies in: four in turn over the lanes.
  ATTN_HD static int OutputChunk(int x, int e, const Work& work) {
    return work.part() * kOutputChunks + (x >> 1) * 4 + work.lane.column_half() * 2 + (e >> 2);
  }

  // Two lanes (n, n ^ 2) hold two rows in halves of a 16-byte chunk: they swap, so that each stores
  // whole chunks of one row.
  ATTN_HD static void WriteOutput(const Work& work, const Shared& shared, const OutputTiles& rO) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const RowTensor o = problem.o;
    const int live_chunks = problem.v_chunks, q_len = s.q_len;
    const bool second = work.lane.index & 2;
    const char* first = RowsOf(o, s.batch, work.at.head, s.q_begin);
#pragma unroll
    for (int m = 0; m < kTeamTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int place = m * 16 + Float32Accumulate::Row(2 * r, work.lane.index);
        factor[r] = ptx::LoadSharedFloat(&shared.end_factor[work.team() * kTeamRows + place]);
      }
      const int row =
          work.team_row() + m * 16 + Float32Accumulate::Row(second * 2, work.lane.index);
      char* out = const_cast<char*>(ptx::Offset(first, row, static_cast<int>(o.row_stride * 2)));
#pragma unroll
      for (int n = 0; n < kOutputChunks / 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int chunk = OutputChunk(2 * n, 4 * half, work);
          uint4 words = SwapRows(rO[m][2 * n], rO[m][2 * n + 1], half, factor, second);
          if (row < q_len && chunk < live_chunks) ptx::StoreGlobal128(out + chunk * 16, words);
        }
      }
    }
  }
  // `low`, `high`: columns 0..3 and 4..7 of the chunk.
  ATTN_HD static uint4 SwapRows(const float (&low)[8], const float (&high)[8], int half,
                                const float (&factor)[2], bool second) {
    uint32_t words[2][2];  // row, low or high
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = Float32Accumulate::Element(r, 2 * half);
      words[r][0] = ptx::PackRounded(low[e] * factor[r], low[e + 1] * factor[r]);
      words[r][1] = ptx::PackRounded(high[e] * factor[r], high[e + 1] * factor[r]);
    }
    uint32_t own0 = second ? words[1][0] : words[0][0], own1 = second ? words[1][1] : words[0][1];
    uint32_t got0 = ptx::ShuffleXor(second ? words[0][0] : words[1][0], 2);
    uint32_t got1 = ptx::ShuffleXor(second ? words[0][1] : words[1][1], 2);
    return second ? make_uint4(got0, own0, got1, own1) : make_uint4(own0, got0, own1, got1);
  }

  // Gives O what PutFinite left out, where it is visible: slow, rare, and far from the hot loop,
  // whose registers it would crowd. One row a thread.
  ATTN_HD static void RestoreNonFinite(const Work& work) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const int row = work.block_row + work.thread;
    if (work.thread >= kTile.q_rows || row >= s.q_len) return;
    char* out = const_cast<char*>(RowsOf(problem.o, s.batch, work.at.head, s.q_begin + row));
    for (int step = 0; step < work.tiles.count(); ++step) {
      const auto visit = work.tiles.Any(step);
      if (!visit.IsPartial()) continue;
      const int first = visit.First(), end = MinInt(first + kStepKeys, s.kv_len);
      for (int key = first; key < end; ++key) {
        if (!Rule::IsVisible(work.at, row, key)) continue;
        const char* value =
            RowsOf(problem.v, s.batch, work.at.head / problem.group, int64_t{s.kv_begin} + key);
        AddNonFinite(value, problem.v_chunks * 4, Dropper::Drops(work.at, row, key), out);
      }
    }
  }
  // Pairs of float16: an infinity counts as it is (its P is positive, however small), or as 0·∞ if
  // it was dropped.
  ATTN_HD static void AddNonFinite(const char* value, int pairs, bool dropped, char* out) {
    for (int n = 0; n < pairs; ++n) {
      const uint32_t word = ptx::LoadConstant32(value + n * 4);
      if (NonFiniteHalves(word) == 0) continue;
      const uint32_t old = ptx::LoadGlobal32(out + n * 4);
      const float factor = dropped ? 0.0f : 1.0f;
      float low = ptx::LowHalf(old), high = ptx::HighHalf(old);
      if (NonFiniteHalves(word) & 0xffffu) low += factor * ptx::LowHalf(word);
      if (NonFiniteHalves(word) >> 16) high += factor * ptx::HighHalf(word);
      ptx::StoreGlobal32(out + n * 4, ptx::PackRounded(low, high));
    }
  }

  // No key is visible to any row of this tile.
  ATTN_HD static void WriteEmptyRows(const Work& work, bool is_score_role) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const int row = work.block_row + work.thread;
    if (work.thread >= kTile.q_rows || row >= s.q_len) return;
    if (is_score_role) {
      ptx::StoreGlobalFloat(LseOf(work) + row, -Infinity());
      return;
    }
    char* out = const_cast<char*>(RowsOf(problem.o, s.batch, work.at.head, s.q_begin + row));
    for (int c = 0; c < problem.v_chunks; ++c) {
      ptx::StoreGlobal128(out + c * 16, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace attnd::sm70
