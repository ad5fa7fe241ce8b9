// Gradients of attention for one tile of keys, in one pass over the queries that see them.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// Eight warps, a step of 64 queries; of small tiles (KernelRow::small) two and 32. A warp makes Sᵀ
// and dPᵀ of 32 keys and its share of the queries, leaves P and dS in shared memory [key][query],
// and from there multiplies all queries for 32 keys and its share of the columns of dV and dK, and
// all queries by all keys for its part of dQ, which it adds to a workspace in lane order; DqKernel
// puts that into place. Q and dO of the next step come by cp.async meanwhile. With GQA a block goes
// through all query heads of its KV head: dK and dV are sums over the group.
//
// dQ's additions: FixedPointSums (the default) adds integers, of which any order gives the same
// bits, so no block waits for another; rules/backward_passes.h bounds them. FloatSums adds float32.
// Rows   without visible keys (lse = −inf) have P = 0. Invisible scores have P = dS = 0 by
//        selection; what lies in an invisible row of K or V reaches nothing, nor do infinities
//        and NaN of Q and dO reach keys that their rows do not see (rules/non_finite_rows.h).
// Inputs float16, bfloat16 or float32; rows as kernels/rules/params.h says. Errors: none.
// Source Dao 2023 (FlashAttention-2), Algorithm 2; docs/KERNELS.md has figures and what lost.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/dq_sums.h"
#include "kernels/rules/list_runs.h"
#include "kernels/rules/row_visits.h"
#include "kernels/sm80/backward_dropout.h"
#include "kernels/sm80/backward_passes.h"
#include "kernels/sm80/pipeline.h"

namespace attnd::sm80 {

template <class Math, Tile kTile, class Rule, template <int> class DropoutPolicy, class DqSums>
struct BackwardKernel {
  static constexpr int kKeys = kTile.kv_rows, kStepRows = kTile.q_rows;
  static constexpr bool kSmall = kStepRows < kDqBlockRows;
  static constexpr int kWarps = kSmall ? 2 : 8, kThreads = kWarps * kWarpLanes;
  static constexpr int kWarpKeys = 32, kKeyTiles = kWarpKeys / 16;
  static constexpr int kShares = kWarps / (kKeys / kWarpKeys);  // warps of the same keys
  static constexpr int kWarpQueries = kStepRows / kShares, kQueryGroups = kWarpQueries / 8;
  static constexpr int kChunks = kTile.head_dim * Math::kBytes / 16, kPitch = PitchOf(kChunks);
  static constexpr int kShareGroups = kTile.head_dim / 8 / kShares;  // of eight columns
  static constexpr bool kSplits = Math::kBytes == 4;                 // operands: float_math.h
  static constexpr int kStages = !kSplits && kTile.head_dim <= (kSmall ? 64 : 128) ? 2 : 1;
  static constexpr int kPairChunks = kStepRows * Math::kBytes / 16;  // of P and dS
  static constexpr int kPairPitch = PitchOf(kPairChunks);
  static_assert(kShareGroups % 2 == 0 && kQueryGroups % 2 == 0);
  // In small tiles a warp makes the sums of dQ of two of the four warps of Dq that have its
  // queries.
  static constexpr int kDqWarps = kSmall ? 2 : 1;
  static_assert(!kSmall || (kStepRows == 32 && kKeys == 32 && Rule::kListed && !kSplits));

  using Dropout = DropoutPolicy<kQueryGroups>;
  using Dq = DqLayoutOf<Math, kTile.head_dim>;
  using Adder = DqAdder<Dq, Math, Rule, DqSums>;
  using Visits = RowVisits<Rule, Rule::kListed, kStepRows>;
  using Cursor = typename Visits::Cursor;
  // StepAt says where a step's queries are.
  template <class Visit>
  struct StepAt {
    int head, row;
    Visit visit;
  };
  ATTN_HD static auto Read(const Visits& visits, const Cursor& at) {
    const auto step = at.template Read<kStepRows>(visits);
    return StepAt<decltype(step.visit)>{at.template Head<kStepRows>(visits), step.row, step.visit};
  }
  ATTN_HD static void Advance(const Visits& visits, Cursor& at) {
    at.template Advance<kStepRows>(visits, at.template Read<kStepRows>(visits));
  }
  enum RowVector { kStabilizer, kDelta, kDqFactor, kRowVectors };
  struct Stage {
    uint4 q[kStepRows * kPitch], d_o[kStepRows * kPitch];
    float rows[kRowVectors][kStepRows];
  };
  struct alignas(128) Shared {
    uint4 k[kKeys * kPitch], v[kKeys * kPitch];  // at the end dK and dV
    Stage stages[kStages];
    uint4 p[kKeys * kPairPitch], ds[kKeys * kPairPitch];
    Descriptors descriptors;
    int left_out;  // whether K holds an infinity or NaN
    typename Visits::Ring visits;
  };

  struct Work {
    const ProblemDesc& problem;
    const SequenceDesc& sequence;
    int batch, kv_head, first_key;
    Visits visits;
    int thread, lane, warp;
    int exponent;       // of two, by which dS of the step is multiplied
    bool gains_differ;  // from step to step
    bool non_finite;    // whether rows of Q or dO may be
    ATTN_HD int key() const { return warp / kShares * kWarpKeys; }  // of the block
    ATTN_HD int share() const { return warp % kShares; }
    ATTN_HD int query() const { return share() * kWarpQueries; }  // of the step
    ATTN_HD ScoreContext At(int head) const {
      return {problem, sequence, batch, head, Rule::OptionsOf(problem)};
    }
    // The n-th warp of Dq whose sums this one makes: as if a block of dQ began with the step, and
    // as it does, `offset` rows before.
    ATTN_HD int DqWarp(int n) const { return warp * kDqWarps + n; }
    ATTN_HD Adder DqSumsOf(int n, int offset) const {
      return {problem, sequence, batch, DqWarp(n) + offset / 8, lane};
    }
    ATTN_HD static int OffsetOf(int row) { return kSmall ? row % kDqBlockRows : 0; }
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) ptx::StoreShared32(&shared.left_out, 0);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    const SequenceDesc& sequence = shared.descriptors.sequence;
    const int first_key = tile.tile * kKeys;
    const int end_key = MinInt(first_key + kKeys, sequence.kv_len);
    const uint32_t* bounds = GradientBounds(problem, tile.batch, tile.head);
    const HeadGains gains(problem, tile.batch, tile.head);
    Work work = {problem,
                 sequence,
                 tile.batch,
                 tile.head,
                 first_key,
                 Visits(problem, sequence, tile, first_key, end_key, shared.visits),
                 at.thread,
                 at.thread & (kWarpLanes - 1),
                 at.thread / kWarpLanes,
                 gains.lowest,
                 gains.differ,
                 ptx::LoadConstant32(bounds + kNonFiniteRows) != 0};
    work.visits.Open(at.thread);
    Accumulate(work, shared);
  }

 private:
  using Scores = float[kKeyTiles][kQueryGroups][4];
  using Sums = float[kKeyTiles][kShareGroups][4];  // dV or dK
  using DqProduct = float[Dq::kQueryTiles][Dq::kColumnTiles][4];
  using KeyCopier = RowCopier<kKeys, kChunks, kPitch, kThreads>;
  using StepCopier = RowCopier<kStepRows, kChunks, kPitch, kThreads>;

  // ---- What comes in.
  ATTN_HD static void CopyKeys(const Work& work, Shared& shared) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    KeyCopier(RowOf(p.k, s.batch, work.kv_head, s.kv_begin), p.k.row_stride * 2, s.kv_len,
              p.qk_chunks, work.thread)
        .Copy(work.first_key, shared.k);
    KeyCopier(RowOf(p.v, s.batch, work.kv_head, s.kv_begin), p.v.row_stride * 2, s.kv_len,
              p.v_chunks, work.thread)
        .Copy(work.first_key, shared.v);
  }
  template <class Place>
  ATTN_HD static void CopyStep(const Work& work, const Place& at, Stage& stage) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    StepCopier(RowOf(p.q, s.batch, at.head, s.q_begin), p.q.row_stride * 2, s.q_len, p.qk_chunks,
               work.thread)
        .Copy(at.row, stage.q);
    StepCopier(RowOf(p.d_o, s.batch, at.head, s.q_begin), p.d_o.row_stride * 2, s.q_len, p.v_chunks,
               work.thread)
        .Copy(at.row, stage.d_o);
#pragma unroll
    for (int first = 0; first < kRowVectors * kStepRows; first += kThreads) {
      const int n = (first + work.thread) / kStepRows, row = work.thread % kStepRows;
      if (n >= kRowVectors) return;
      const float* vector = n == kStabilizer ? p.stabilizer : n == kDelta ? p.delta : p.dq_factor;
      const bool exists = at.row + row < s.q_len;
      ptx::CopyAsync4(&stage.rows[n][row],
                      vector + s.batch * p.lse_batch + at.head * p.lse_head + s.q_begin +
                          (exists ? at.row + row : 0),
                      exists);
    }
  }
  ATTN_HD static void FindNonFiniteKeys(const Work& work, Shared& shared) {
    uint32_t met = 0;
#pragma unroll 1
    for (int n = work.thread; n < kKeys * kChunks; n += kThreads) {
      const uint4 bad = NonFiniteHalves<Math>(
          ptx::LoadShared128(At(shared.k, ChunkOffset<kPitch>(n / kChunks, n % kChunks))));
      met |= bad.x | bad.y | bad.z | bad.w;
    }
    if (met != 0) ptx::StoreShared32(&shared.left_out, 1);
  }

  // ---- The loop.
  ATTN_HD static void Accumulate(Work& work, Shared& shared) {
    const int rounds = work.visits.rounds();
    Sums d_k, d_v;
    Clear(d_k);
    Clear(d_v);
    Cursor here(work.visits), ahead(work.visits);
    CopyKeys(work, shared);
    auto copy_next = [&](int round) {
      if (round < rounds) {
        CopyStep(work, Read(work.visits, ahead), shared.stages[round % kStages]);
        Advance(work.visits, ahead);
      }
      ptx::CommitCopies();
    };
    copy_next(0);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      ptx::WaitForCopies<0>();
      ptx::SyncThreads();  // this step's tiles are there, and all are done with the last one's
      if (round == 0) FindNonFiniteKeys(work, shared);
      work.visits.Advance(round, work.thread);
      if (kStages == 2) copy_next(round + 1);
      const auto at = Read(work.visits, here);
      if (work.gains_differ) FollowGain(at.head, at.row, work, d_k);
      Step(work, at, here, shared.stages[round % kStages], shared, d_k, d_v);
      Advance(work.visits, here);
      if (kStages == 1) {
        ptx::SyncThreads();
        copy_next(round + 1);
      }
    }
    ptx::WaitForCopies<0>();
    ptx::SyncThreads();
    WriteKeyGradients(work, d_k, d_v, shared);
    if (rounds > 0 && ptx::LoadShared32(&shared.left_out)) {
      MarkNonFiniteKeys(work);
    }
  }
  // Brings the sums to the gain of the step's rows.
  ATTN_HD static void FollowGain(int head, int row, Work& work, Sums& d_k) {
    const int gain = GainOfTile(work.problem, work.batch, head, row / kDqBlockRows);
    if (gain == kNoGain || gain == work.exponent) return;
    const float factor = PowerOfTwo(MaxInt(gain - work.exponent, -126));
    work.exponent = gain;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kShareGroups * 4; ++n) d_k[m][n >> 2][n & 3] *= factor;
    }
  }
  ATTN_HD static void MarkNonFiniteKeys(const Work& work) {
#pragma unroll 1
    for (int round = 0; round < work.visits.rounds(); ++round) {
      const int row = work.visits.RowOf(round), offset = work.OffsetOf(row);
#pragma unroll 1
      for (int n = 0; n < kDqWarps; ++n) {
        work.DqSumsOf(n, offset).MarkNonFiniteKeys(work.visits.HeadOf(round), row - offset,
                                                   work.kv_head, work.first_key, kKeys);
      }
    }
  }
  ATTN_HD static void Clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kShareGroups * 4; ++n) sums[m][n >> 2][n & 3] = 0;
    }
  }

  template <class Place>
  ATTN_HD static void Step(const Work& work, const Place& at, const Cursor& cursor, Stage& stage,
                           Shared& shared, Sums& d_k, Sums& d_v) {
    // A block's last keys may lie beyond the sequence.
    const bool is_cut = at.visit.IsCut() || work.first_key + kKeys > work.sequence.kv_len;
    const bool partial = at.visit.IsPartial() || is_cut;
    const uint32_t shown = Shown(work, at, cursor);
    Scores rS;
    Product(work, shared.k, stage.q, rS);
    uint32_t visible[kKeyTiles];
    Scores slopes;
    if (Rule::kEveryTile || partial) ApplyRule(work, at, is_cut, shown, rS, slopes, visible);
    MakeP(work, partial, visible, stage, rS);
    const Dropout dropout(work.At(at.head), at.row + work.query(), work.first_key + work.key(),
                          work.lane);
    StoreP(work, rS, dropout, shared.p);
    Scores rD;
    Product(work, shared.v, stage.d_o, rD);
    MakeDs(work, partial, visible, stage, dropout, rS, slopes, rD);
    StorePairs(work, rD, shared.ds);
    ptx::SyncThreads();  // P and dS are there
    if (partial && work.non_finite) LeaveOutRows(work, stage);
    AddProduct(work, shared.p, stage.d_o, d_v);
    AddProduct(work, shared.ds, stage.q, d_k);
    AddQueryGradient(work, at.head, at.row, stage, shared);
  }

  // The keys' rows of `keys` by the warp's rows of `queries`.
  ATTN_HD static void Product(const Work& work, const void* keys, const void* queries, Scores& rS) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kQueryGroups * 4; ++n) rS[m][n >> 2][n & 3] = 0;
    }
    Scores first = {};  // of float32: the sums over the first half of a wide head
    const LanePlace of_a = LanePlace::OfA(work.lane), of_b = LanePlace::OfColumns(work.lane);
    const int a_offset = ChunkOffset<kPitch>(work.key() + of_a.row, of_a.chunk);
    const int b_offset = ChunkOffset<kPitch>(work.query() + of_b.row, of_b.chunk);
#pragma unroll(kSplits ? 2 : kChunks / 2)
    for (int c = 0; c < kChunks / 2; ++c) {
      uint32_t a[kKeyTiles][Math::kOperandWords];
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        Math::ToOperand(ptx::LoadMatrices(At(keys, Moved<kPitch>(a_offset, m * 16, 2 * c))), a[m]);
      }
#pragma unroll
      for (int x = 0; x < kQueryGroups / 2; ++x) {
        const uint4 b = ptx::LoadMatrices(At(queries, Moved<kPitch>(b_offset, x * 16, 2 * c)));
        Math::Multiply(rS, 2 * x, a, b);
      }
      if constexpr (kSplits && kTile.head_dim > 64) {
        if (c == kChunks / 4 - 1) Math::Fold(rS, first);
      }
    }
    if constexpr (kSplits && kTile.head_dim > 64) Math::Fold(first, rS);
    if constexpr (kSplits) {
      Math::template Repair<kPitch, kChunks>(
          keys, queries,
          [&](int m, int group, int e) {
            return typename Math::Rows{work.key() + m * 16 + Accumulator::Row(e, work.lane),
                                       work.query() + group * 8 + Accumulator::Col(e, work.lane)};
          },
          rS);
    }
  }

  // The lane's word of a masked visit: its bits 16m + 8r + 2t + c are of key tile m, row r of the
  // tile and the c-th of two queries of group t.
  template <class Place>
  ATTN_HD static uint32_t Shown(const Work& work, const Place& at, const Cursor& cursor) {
    uint32_t shown = ~0u;
    if constexpr (Rule::kListed) {
      if (at.visit.IsMasked()) {
        const int square = SquareOf(work.query(), work.key(), kKeys);
        const char* bitmap =
            ptx::Offset(work.problem.tile_lists.bitmaps + square + work.lane,
                        static_cast<int>(cursor.template Bitmap<kStepRows>(work.visits)),
                        BitmapWords(kStepRows, kKeys) * 4);
        shown = ptx::LoadConstant32(bitmap) >> (work.query() % kMaskSquare / 4);
      }
    }
    return shown;
  }

  // Pair kQueryGroups·r + t of key tile m: row r of the tile, group t of queries. `visible`: a bit
  // for each of its scores in that order; those of invisible ones mean nothing.
  template <class Place>
  ATTN_HD static void ApplyRule(const Work& work, const Place& at, bool is_cut, uint32_t shown,
                                Scores& rS, Scores& slopes, uint32_t (&visible)[kKeyTiles]) {
    constexpr int kPairs = 2 * kQueryGroups;
    const ScoreContext context = work.At(at.head);
    const int lane = ptx::Keep(work.lane);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      ScorePlace pairs[kPairs];
      float scores[kPairs][2], slope[kPairs][2];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int r = n / kQueryGroups, t = n % kQueryGroups;
        pairs[n] = {at.row + work.query() + t * 8 + Accumulator::Col(0, lane),
                    work.first_key + work.key() + m * 16 + Accumulator::Row(2 * r, lane)};
        scores[n][0] = rS[m][t][2 * r];
        scores[n][1] = rS[m][t][2 * r + 1];
      }
      uint32_t seen = shown >> (16 * m);
      if (kQueryGroups == 2) seen = (seen & 0xfu) | (seen >> 4 & 0xf0u);
      visible[m] =
          Rule::template ApplyAll<Along::kRows>(context, pairs, is_cut, seen, scores, slope);
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        const int r = (n >> 1) / kQueryGroups, t = (n >> 1) % kQueryGroups, e = 2 * r + (n & 1);
        rS[m][t][e] = scores[n >> 1][n & 1];
        if constexpr (Rule::kEveryTile) slopes[m][t][e] = slope[n >> 1][n & 1];
      }
    }
  }
  ATTN_HD static bool IsShown(const uint32_t (&visible)[kKeyTiles], int m, int t, int e) {
    return visible[m] >> (2 * (kQueryGroups * (e >> 1) + t) + (e & 1)) & 1;
  }
  // Loads a vector's numbers of the two queries of group t.
  ATTN_HD static float2 RowPair(const Work& work, const Stage& stage, RowVector vector, int t) {
    return ptx::LoadSharedFloat2(
        &stage.rows[vector][work.query() + t * 8 + Accumulator::Col(0, work.lane)]);
  }
  ATTN_HD static void MakeP(const Work& work, bool partial, const uint32_t (&visible)[kKeyTiles],
                            const Stage& stage, Scores& rS) {
    const float multiplier = Rule::Multiplier(work.problem);
#pragma unroll
    for (int t = 0; t < kQueryGroups; ++t) {
      const float2 rows = RowPair(work, stage, kStabilizer, t);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rS[m][t][e] = ptx::Exp2(ptx::Fma(rS[m][t][e], multiplier, -(e & 1 ? rows.y : rows.x)));
        }
      }
    }
    // A row whose lse is NaN must not reach the keys that it does not see.
    if (partial || Rule::kEveryTile) Hide(partial, visible, rS);
  }
  ATTN_HD static void Hide(bool partial, const uint32_t (&visible)[kKeyTiles], Scores& rS) {
    if (!partial) return;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kQueryGroups * 4; ++n) {
        if (!IsShown(visible, m, n >> 2, n & 3)) rS[m][n >> 2][n & 3] = 0;
      }
    }
  }
  // dS of P in `rS` and dP in `rD`, which it replaces.
  ATTN_HD static void MakeDs(const Work& work, bool partial, const uint32_t (&visible)[kKeyTiles],
                             const Stage& stage, const Dropout& dropout, const Scores& rS,
                             const Scores& slopes, Scores& rD) {
    const float gain = PowerOfTwo(work.exponent - kProbabilityShift);
    const float multiplier = Dropout::kDrops ? gain * work.problem.dropout_scale : gain;
    const bool has_slope = Rule::HasSlope(work.problem);
#pragma unroll
    for (int t = 0; t < kQueryGroups; ++t) {
      const float2 rows = RowPair(work, stage, kDelta, t);
      const float delta[2] = {rows.x * gain, rows.y * gain};
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& d = rD[m][t][e];
          float difference = ptx::Fma(d, multiplier, -delta[e & 1]);
          if constexpr (Dropout::kDrops) {
            const uint32_t keep = dropout.Mask(m, e >> 1, t);
            if (!(keep & (e & 1 ? 0x10000u : 1u))) difference = -delta[e & 1];
          }
          d = rS[m][t][e] * difference;
          if constexpr (Rule::kEveryTile) {
            if (has_slope) d *= slopes[m][t][e];
          }
        }
      }
    }
    if (partial) Hide(partial, visible, rD);
  }

  // Stores a pair as [key][query]; of float32 four even queries of eight and then the odd ones, so
  // that what MultiplyRows calls k index n stands there (float_math.h).
  ATTN_HD static void StorePair(const Work& work, int m, int r, int t, const float (&pair)[4],
                                uint32_t mask, void* to) {
    const int row = work.key() + m * 16 + Accumulator::Row(2 * r, work.lane);
    const int group = work.query() / 8 + t, place = (work.lane & 3) * 4;
    if constexpr (kSplits) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::StoreShared32(At(to, ChunkOffset<kPairPitch>(row, 2 * group + n) + place),
                           ptx::FloatBits(pair[2 * r + n]) & Math::Spread(mask, n));
      }
    } else {
      ptx::StoreShared32(At(to, ChunkOffset<kPairPitch>(row, group) + place),
                         Math::Pack(pair[2 * r], pair[2 * r + 1]) & mask);
    }
  }
  ATTN_HD static void StoreP(const Work& work, const Scores& rS, const Dropout& dropout, void* to) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int t = 0; t < kQueryGroups; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          StorePair(work, m, r, t, rS[m][t], dropout.Mask(m, r, t), to);
        }
      }
    }
  }
  ATTN_HD static void StorePairs(const Work& work, const Scores& rS, void* to) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int t = 0; t < kQueryGroups; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          StorePair(work, m, r, t, rS[m][t], ~0u, to);
        }
      }
    }
  }

  // Infinities and NaN of what P and dS multiply (rules/non_finite_rows.h).
  ATTN_HD static void LeaveOutRows(const Work& work, Stage& stage) {
    LeaveOutNonFinite<Math, kStepRows, kChunks, kPitch, kThreads>(stage.q, work.thread);
    LeaveOutNonFinite<Math, kStepRows, kChunks, kPitch, kThreads>(stage.d_o, work.thread);
    ptx::SyncThreads();
  }

  // dV += (P∘Z)ᵀ·dO or dK += dSᵀ·Q.
  ATTN_HD static void AddProduct(const Work& work, const void* pairs, const void* rows,
                                 Sums& sums) {
    const LanePlace of_a = LanePlace::OfA(work.lane), of_b = LanePlace::OfRows(work.lane);
    const int a_offset = ChunkOffset<kPairPitch>(work.key() + of_a.row, of_a.chunk);
    Sums step;  // of float32
    Clear(step);
#pragma unroll(kSplits ? 2 : kPairChunks / 2)
    for (int y = 0; y < kPairChunks / 2; ++y) {
      uint32_t a[kKeyTiles][Math::kOperandWords];
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        Math::ToOperand(ptx::LoadMatrices(At(pairs, Moved<kPairPitch>(a_offset, m * 16, 2 * y))),
                        a[m]);
      }
      if constexpr (kSplits) {
        Math::template MultiplyRows<kPitch>(a, rows, y * 8, work.share() * kShareGroups * 2,
                                            work.lane, step);
        continue;
      }
#pragma unroll
      for (int c = 0; c < kShareGroups / 2; ++c) {
        const uint4 b = ptx::LoadMatricesTransposed(At(
            rows, y * 16 * kPitch * 16 + ChunkOffset<kPitch>(of_b.row, work.share() * kShareGroups +
                                                                           2 * c + of_b.chunk)));
        Math::Multiply(sums, 2 * c, a, b);
      }
    }
    if constexpr (kSplits) {
#pragma unroll
      for (int n = 0; n < kKeyTiles * kShareGroups * 4; ++n) {
        sums[n / (4 * kShareGroups)][n / 4 % kShareGroups][n & 3] +=
            step[n / (4 * kShareGroups)][n / 4 % kShareGroups][n & 3];
      }
    }
  }

  // ---- dQ.
  ATTN_HD static void AddQueryGradient(const Work& work, int head, int row, const Stage& stage,
                                       Shared& shared) {
    const bool left_out = ptx::LoadShared32(&shared.left_out) != 0;
    if (left_out) {  // K as it is was for scores
      ptx::SyncThreads();
      LeaveOutNonFinite<Math, kKeys, kChunks, kPitch, kThreads>(shared.k, work.thread);
      ptx::SyncThreads();
    }
#pragma unroll
    for (int n = 0; n < kDqWarps; ++n) {
      DqProduct rQ;
#pragma unroll
      for (int x = 0; x < Dq::kSums; ++x) {
        rQ[x / (4 * Dq::kColumnTiles)][x / 4 % Dq::kColumnTiles][x & 3] = 0;
      }
      if constexpr (kSplits) {
        MultiplyQueries(work, work.DqWarp(n), shared, rQ);
      } else {
        MultiplyHalfQueries(work, work.DqWarp(n), shared, rQ);
      }
      AddSums(work, n, head, row, stage, rQ);
    }
    if (left_out) {
      ptx::SyncThreads();
      CopyKeys(work, shared);
      ptx::CommitCopies();
    }
  }
  // Operand a is dSᵀ as it stands: a lane has four queries of each of two keys.
  ATTN_HD static void MultiplyQueries(const Work& work, int warp, const Shared& shared,
                                      DqProduct& rQ) {
    static_assert(!kSplits || Dq::kQueryTiles == 2);
    const int chunk = Dq::FirstQuery(warp) / 4 + (work.lane >> 2);
#pragma unroll 2
    for (int y = 0; y < kKeys / 8; ++y) {
      const int key = y * 8 + (work.lane & 3) * 2;
      uint32_t even[4], odd[4], a[2][Math::kOperandWords];
      ToWords(ptx::LoadShared128(At(shared.ds, ChunkOffset<kPairPitch>(key, chunk))), even);
      ToWords(ptx::LoadShared128(At(shared.ds, ChunkOffset<kPairPitch>(key + 1, chunk))), odd);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Math::ToOperand(make_uint4(even[2 * m], even[2 * m + 1], odd[2 * m], odd[2 * m + 1]), a[m]);
      }
      Math::template MultiplyRows<kPitch>(a, shared.k, y * 8, Dq::FirstColumn(warp) / 4, work.lane,
                                          rQ);
    }
  }
  ATTN_HD static void MultiplyHalfQueries(const Work& work, int warp, const Shared& shared,
                                          DqProduct& rQ) {
    const LanePlace of_a = LanePlace::OfColumns(work.lane), of_b = LanePlace::OfRows(work.lane);
    const int query_chunk = Dq::FirstQuery(warp) / 8;
    const int column_chunk = Dq::FirstColumn(warp) / 8;
#pragma unroll
    for (int y = 0; y < kKeys / 16; ++y) {
      uint32_t a[Dq::kQueryTiles][4];
#pragma unroll
      for (int m = 0; m < Dq::kQueryTiles; ++m) {
        ToWords(ptx::LoadMatricesTransposed(
                    At(shared.ds,
                       y * 16 * kPairPitch * 16 +
                           ChunkOffset<kPairPitch>(of_a.row, query_chunk + 2 * m + of_a.chunk))),
                a[m]);
      }
#pragma unroll
      for (int c = 0; c < Dq::kColumnTiles / 2; ++c) {
        const uint4 b = ptx::LoadMatricesTransposed(
            At(shared.k, y * 16 * kPitch * 16 +
                             ChunkOffset<kPitch>(of_b.row, column_chunk + 2 * c + of_b.chunk)));
        Math::Multiply(rQ, 2 * c, a, b);
      }
    }
  }
  ATTN_HD static void AddSums(const Work& work, int of, int head, int row, const Stage& stage,
                              DqProduct& rQ) {
    if constexpr (DqSums::kFixedPoint) {
      const float ungain = PowerOfTwo(-work.exponent);
#pragma unroll
      for (int m = 0; m < Dq::kQueryTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int query = Dq::QueryOf(m, r, work.DqWarp(of), work.lane);
          const float of_row = ptx::LoadSharedFloat(&stage.rows[kDqFactor][query]);
          const float factor = FixedPoint::RowFactor(of_row, ungain);
#pragma unroll
          for (int x = 0; x < Dq::kColumnTiles; ++x) {
            rQ[m][x][2 * r] *= factor;
            rQ[m][x][2 * r + 1] *= factor;
          }
        }
      }
    }
    const float watch = ptx::BitsFloat(work.problem.dq_rest != 0 ? 0x7fffffffu : 0);
    const int offset = work.OffsetOf(row);
    work.DqSumsOf(of, offset).Add(head, row - offset, 0, watch, [&](int n) {
      return rQ[n / (4 * Dq::kColumnTiles)][Dq::Group(n)][Dq::Element(n)];
    });
  }

  // ---- dK, dV.
  ATTN_HD static void WriteKeyGradients(const Work& work, const Sums& d_k, const Sums& d_v,
                                        Shared& shared) {
    const ProblemDesc& p = work.problem;
    const GradientWriter of_k(p, p.scale, p.d_k_exponent - work.exponent);
    const GradientWriter of_v(p, p.dropout_scale, p.d_v_exponent - kProbabilityShift);
    if constexpr (Rule::kListed && !kSplits) {
      if (IsRun(p)) {
        WriteRun(work, of_k, d_k, p.d_k, p.qk_chunks);
        return WriteRun(work, of_v, d_v, p.d_v, p.v_chunks);
      }
    }
    Put(work, of_k, d_k, shared.k);
    Put(work, of_v, d_v, shared.v);
    ptx::SyncThreads();
    Write(work, p.d_k, p.qk_chunks, shared.k);
    Write(work, p.d_v, p.v_chunks, shared.v);
  }
  ATTN_HD static void WriteRun(const Work& work, const GradientWriter& writer, const Sums& sums,
                               const RowTensor& t, int live_chunks) {
    const SequenceDesc& s = work.sequence;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = work.first_key + work.key() + m * 16 + Accumulator::Row(2 * r, work.lane);
        if (key >= s.kv_len) continue;
        char* const to = RowOf(t, s.batch, work.kv_head, s.kv_begin + key) + (work.lane & 3) * 8;
#pragma unroll
        for (int c = 0; c < kShareGroups; ++c) {
          const int chunk = work.share() * kShareGroups + c;
          if (chunk >= live_chunks) continue;
          ptx::StoreGlobal64(to + chunk * 32,
                             writer.Floats(sums[m][c][2 * r], sums[m][c][2 * r + 1]));
        }
      }
    }
  }
  ATTN_HD static void Put(const Work& work, const GradientWriter& writer, const Sums& sums,
                          void* to) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.key() + m * 16 + Accumulator::Row(2 * r, work.lane);
#pragma unroll
        for (int c = 0; c < kShareGroups; ++c) {
          const float low = sums[m][c][2 * r], high = sums[m][c][2 * r + 1];
          if constexpr (kSplits) {
            const uint2 numbers = writer.Floats(low, high);
            ptx::StoreShared32(At(to, NumberAt(work, row, c, 0)), numbers.x);
            ptx::StoreShared32(At(to, NumberAt(work, row, c, 1)), numbers.y);
          } else {
            const int offset = ChunkOffset<kPitch>(row, work.share() * kShareGroups + c);
            ptx::StoreShared32(At(to, offset + (work.lane & 3) * 4), writer.Pack(low, high));
          }
        }
      }
    }
  }
  ATTN_HD static int NumberAt(const Work& work, int row, int c, int e) {
    return NumberOffset<kPitch>(row, work.share() * kShareGroups * 8 +
                                         Math::template Column<kShareGroups>(c, e, work.lane));
  }
  ATTN_HD static void Write(const Work& work, const RowTensor& t, int live_chunks,
                            const void* from) {
    const SequenceDesc& s = work.sequence;
    const char* first = RowOf(t, s.batch, work.kv_head, s.kv_begin);
    const int row_bytes = static_cast<int>(t.row_stride * 2);
#pragma unroll 1
    for (int n = work.thread; n < kKeys * kChunks; n += kThreads) {
      const int row = n / kChunks, chunk = n % kChunks;
      if (work.first_key + row >= s.kv_len || chunk >= live_chunks) continue;
      char* out = const_cast<char*>(ptx::Offset(first, work.first_key + row, row_bytes));
      ptx::StoreGlobal128(out + chunk * 16,
                          ptx::LoadShared128(At(from, ChunkOffset<kPitch>(row, chunk))));
    }
  }
};

}  // namespace attnd::sm80
