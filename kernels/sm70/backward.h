// Gradients of attention for one tile of keys, in one pass over the queries that see them.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// Roles: warps 0-3 make Sᵀ, P and dV of their keys (K in registers), warps 4-7 one step behind dPᵀ,
// dS and dK of the same keys (V in registers). A step is 32 queries (16 at head_dim 256); once in a
// round of 64 all eight warps turn dS into their share of dQ and add it to a workspace in lane
// order (each addition one full line); DqKernel puts that into place.
//
// Both roles run the same code for their products, with Q and dO swapped; only the arithmetic
// between branches. P reaches the second role in accumulator layout, a dropped score marked by its
// sign; dS is stored [key][64 queries], so that dQ reads it as A by columns and K as B by rows.
// Small tiles, of masks that show little of larger ones: a block is one warp of each role (two of
// wide heads), and both work on the same step of 32 queries, which is a round. What is handed over
// is waited for: blocks are many and their rings short.
// With GQA a block goes through all query heads of its KV head: dK and dV are sums over the group.
// Above 128 columns two warps share their keys, each with half of the columns; they add their
// halves of Sᵀ and dPᵀ through shared memory.
//
// dQ's additions: FixedPointSums (the default) adds integers, of which any order gives the same
// bits, so no block waits for another; rules/backward_passes.h bounds them. FloatSums adds float32.
// Rows   without visible keys (lse = −inf) have P = 0. Invisible scores have P = dS = 0 by
//        selection; what lies in an invisible row of K or V reaches nothing, nor do infinities
//        and NaN of Q and dO reach keys that their rows do not see (rules/non_finite_rows.h).
// Inputs float16; rows as kernels/rules/params.h says. Errors: none.
// Source Dao 2023 (FlashAttention-2), Algorithm 2; docs/KERNELS.md has figures and what lost.
#pragma once

#include "kernels/ptx/mma_sm70.h"
#include "kernels/rules/list_runs.h"
#include "kernels/rules/online_softmax.h"
#include "kernels/rules/row_visits.h"
#include "kernels/sm70/backward_dq.h"
#include "kernels/sm70/backward_dropout.h"
#include "kernels/sm70/backward_keys.h"
#include "kernels/sm70/backward_scores.h"
#include "kernels/sm70/backward_staging.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

template <Tile kTile, class Rule, class DropoutPolicy, class DqSums>
struct BackwardKernel {
  using Math = Float32Accumulate;
  using ScoreRule = Rule;
  static constexpr bool kSmall = kTile.q_rows == 32 && kTile.kv_rows == 32;
  static constexpr int kRoleWarps = !kSmall ? 4 : kTile.head_dim > 64 ? 2 : 1;
  static constexpr int kThreads = 64 * kRoleWarps;
  static constexpr int kHeadDim = PaddedColumns(kTile.head_dim),
                       kChunks = kHeadDim / 8;  // from row to row
  // In small tiles short rows of Q and dO (K and V, K and dS) stand side by side.
  static constexpr bool kSharesRows = kSmall && kTile.head_dim <= 32;
  static constexpr int kRowChunks = kSmall ? kTile.head_dim / 8 : kChunks;
  static constexpr int kSplit = kHeadDim > 128 ? 2 : 1;  // warps of the same keys, by columns
  static constexpr int kWarpDim = kTile.head_dim / kSplit, kWarpChunks = kWarpDim / 8;
  static constexpr int kKeys = kTile.kv_rows;                           // of the block
  static constexpr int kKeyTiles = kKeys * kSplit / (16 * kRoleWarps);  // of 16 keys, for a warp
  static constexpr int kWarpKeys = 16 * kKeyTiles;
  static constexpr int kStepRows = kTile.q_rows, kGroupRows = 16;
  static constexpr int kGroups = kStepRows / kGroupRows;
  static constexpr int kRoundRows = kSmall ? kStepRows : kDqBlockRows;
  static constexpr int kRoundSteps = kRoundRows / kStepRows;
  // Rounds in flight: from the dQ that the last warp still adds to the step that the first one
  // brings.
  static constexpr int kFactorRounds = kSmall ? 3 : kRoundSteps < 4 ? 4 : 2;
  static constexpr int kSlots = !kSmall       ? 3
                                : kSharesRows ? 2
                                              : 1,
                       kHands = kSmall ? 1 : 2, kDsBuffers = kHands;
  static constexpr int kRoleBarrier = 5;  // and 6; those before are pairs' of warps
  static constexpr int kHandBarrier = 7;  // and on: P of a warp's group is there, of small tiles
  static constexpr bool kFixedPoint = DqSums::kFixedPoint;
  // A step has so many vectors of its rows, and each thread brings one so often.
  static constexpr int kVectors = kFixedPoint ? 3 : 2;
  static constexpr int kVectorPasses = kRoleWarps == 1 ? 2 : 1;
  static_assert(kVectors * kStepRows <= kVectorPasses * kThreads);
  // Stored under products, P costs registers that only this one has to spare.
  static constexpr bool kStoresPLate = kHeadDim == 64 && !kFixedPoint;
  // Tells whether registers are left for the distance of rows of Q and dO: 1 % faster.
  static constexpr bool kKeepsPitches = kHeadDim == 128 && !kFixedPoint;
  using Dq = DqLayout<kHeadDim>;
  static constexpr int kDqParts = kRoleWarps == 1 ? (kSharesRows ? 1 : 2) : Dq::kParts;
  using Visits = RowVisits<Rule, Rule::kListed, kRoundRows>;
  using Cursor = typename Visits::Cursor;
  // Places of listed steps come from shared memory: brought ahead as far as registers go.
  using StepPlace = PlaceOfStep<Visits, kStepRows, Rule::kListed && kHeadDim <= 64>;
  using FetchPlace = PlaceOfStep<Visits, kStepRows, Rule::kListed>;
  // dQ of short rows: the column halves of a product have different keys (backward_dq.h).
  static constexpr bool kPairsKeys = !kSmall && kTile.head_dim == 32;
  static_assert(kStepRows % 16 == 0 && (kSmall || kRoundSteps >= 2) && kKeyTiles > 0);
  static_assert(!kSmall || (Rule::kListed && !Rule::kEveryTile && kTile.head_dim <= 128));

  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kTileBytes = kStepRows * kRowBytes;
  static constexpr int kPairBytes = (kSharesRows ? 1 : 2) * kTileBytes;  // Q and dO
  static constexpr int kHandBytes = kKeyTiles * kGroups * 512;           // P of one warp and step
  static constexpr int kDsBytes = kKeys * 128;                           // dS of a round
  // Where, in tiles of `rows` rows, the second tensor has what the first one has at `place`.
  ATTN_HD static constexpr int Second(int place, int rows) {
    return kSharesRows ? place ^ 64 : place + rows * kRowBytes;
  }
  // The row that this thread brings a chunk of, chunk thread % kRowChunks. Two short rows that are
  // stored together lie in different halves of their lines.
  ATTN_HD static constexpr int RowOfThread(int thread) {
    const int n = thread / kRowChunks;
    return kRowChunks > 4 ? n : (n & ~5) | (n & 1) << 2 | (n >> 2 & 1);
  }
  // Returns where chunk `chunk` of K is for dQ: short rows leave dS the first half of either half
  // line.
  ATTN_HD static constexpr int DqChunk(int chunk) {
    return kSharesRows ? 2 + (chunk & 1) + (chunk & 2) * 2 : chunk;
  }
  static constexpr int kShiftOfP = kProbabilityShift;
  ATTN_HD static float GradientMultiplier(const ProblemDesc& p) {
    return PowerOfTwo(-kShiftOfP) * DropoutPolicy::Factor(p);
  }
  using Slot = StepSlot<kPairBytes, kStepRows>;
  static constexpr int kSlotBytes = sizeof(Slot);
  struct alignas(128) Shared {
    uint4 k[kKeys * kChunks];  // and dS, where rows share lines
    Slot slots[kSlots];
    uint4 p[kHands][kRoleWarps][kHandBytes / 16];
    uint4 own_ds[kSharesRows ? 1 : kDsBuffers * kDsBytes / 16];
    uint4 partial[kSplit == 1 ? 1 : 8 * 64];                // a warp's half of scores
    uint4 slopes[kSplit == 1 ? 1 : 8 * (kHandBytes / 16)];  // softcap's derivative, placed as P
    Descriptors descriptors;
    // The factors of dQ of the last steps' rows, in the order of DqLayout::FactorAt.
    float factors[kFixedPoint ? kFactorRounds : 1][kRoundRows];
    float watch;       // 0; NaN where sums of dQ have a second integer
    int gains_differ;  // from tile to tile of rows
    int gains[kKeptGains];
    int left_out;    // whether K held an infinity or NaN
    int non_finite;  // whether rows of Q or dO may (rules/non_finite_rows.h); not of listed visits
    typename Visits::Ring visits;
    ATTN_HD void* ds() { return kSharesRows ? k : own_ds; }
    ATTN_HD const void* ds() const { return kSharesRows ? k : own_ds; }
  };
  static_assert(sizeof(Shared) * kTile.blocks_per_sm <= 96 * 1024, "Volta has 96 KiB an SM");

  struct Work {
    const ProblemDesc& problem;
    const SequenceDesc& sequence;
    int batch, kv_head, first_key;
    Visits visits;
    HeadGains gains;
    float multiplier;  // of the raw products of this role
    int thread;
    int role;  // 0: P and dV, 1: dS and dK; by a vote, so that the compiler
               // knows warps do not part
    Lane lane;
    ATTN_HD int warp() const { return thread >> 5; }
    ATTN_HD int role_warp() const { return warp() & (kRoleWarps - 1); }
    ATTN_HD int half() const { return warp() % kSplit; }  // of the columns
    ATTN_HD int warp_key() const { return role_warp() / kSplit * kWarpKeys; }
    ATTN_HD ScoreContext At(int head) const {
      return {problem, sequence, batch, head, Rule::OptionsOf(problem)};
    }
  };

  ATTN_HD static void PutFactor(Shared& shared, int step, int row, float factor) {
    float* of_step = shared.factors[0] + step % (kFactorRounds * kRoundSteps) * kStepRows;
    ptx::StoreSharedFloat(of_step + Dq::FactorAt(row), factor);
  }
  ATTN_HD static char* At(void* base, int offset) { return static_cast<char*>(base) + offset; }
  ATTN_HD static const char* At(const void* base, int offset) {
    return static_cast<const char*>(base) + offset;
  }
  // Byte offsets of this lane's operands in shared memory.
  struct Places {
    int columns;      // B by columns: query OperandKey, chunk 0, of Q (role 0) or dO
    int own, other;   // B by rows: queries of the own or other column half, the
                      // lane's chunk, of the other tensor
    int row;          // what belongs to the query of the lane's first column, in a slot
    int hand;         // of P, within a step's
    int ds;           // of dS: key OperandRow of tile 0, chunk of its column half
    int dq_ds, dq_k;  // QueryGradient's operands: dS by columns, K by rows
    ATTN_HD explicit Places(const Work& work) {
      const Lane lane = work.lane;
      const int chunk = lane.column_half() * 2 + lane.upper();
      const int own_row = lane.quad() | lane.column_half() << 2;
      const int columns_at = ChunkOffset(lane.OperandKey(), 0, kChunks);
      const int own_at = ChunkOffset(own_row, chunk, kChunks);
      const int other_at = ChunkOffset(own_row ^ 4, chunk, kChunks);
      if constexpr (kSharesRows) {
        columns = ptx::Keep(columns_at ^ work.role * 64);
        own = ptx::Keep(own_at ^ (work.role ^ 1) * 64);
        other = ptx::Keep(other_at ^ (work.role ^ 1) * 64);
      } else {
        const int tile = work.role ? kTileBytes : 0;
        const int half = work.half() * kWarpDim * 2, columns_of = kTileBytes - tile + half;
        columns = ptx::Keep(columns_at + tile + half);
        own = ptx::Keep(own_at + columns_of);
        other = ptx::Keep(other_at + columns_of);
      }
      row = ptx::Keep(kPairBytes + (work.role * kStepRows + Math::Col(0, lane.index)) * 4);
      hand = ptx::Keep(work.role_warp() * kHandBytes + lane.index * 16);
      ds = ptx::Keep(ChunkOffset(work.warp_key() + lane.OperandRow(), lane.column_half() * 4, 8));
      const int ds_chunk = lane.row_half() * 4 + (kSmall ? 0 : work.role * 2) + lane.upper();
      const int dq_key = kPairsKeys ? lane.quad() | lane.column_half() << 2 : lane.quad();
      dq_ds = ptx::Keep(ChunkOffset(dq_key, ds_chunk, 8));
      const int k_chunk = kSharesRows       ? DqChunk(work.warp() + 2 * lane.column_half())
                          : kRoleWarps == 1 ? lane.column_half() * 4 + 2 * work.warp()
                          : kPairsKeys
                              ? work.warp() & 3
                              : Dq::Chunk(work.warp(), lane) + (Dq::kWide ? lane.upper() : 0);
      dq_k = ptx::Keep(ChunkOffset(dq_key, k_chunk, kChunks) + (Dq::kWide ? 0 : lane.upper() * 8));
    }
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) ptx::StoreShared32(&shared.left_out, 0);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    if (at.thread == 0) {
      ptx::StoreShared32(&shared.watch, problem.dq_rest != 0 ? 0x7fffffffu : 0);
      if constexpr (!Rule::kEveryTile) {
        ptx::StoreShared32(
            &shared.non_finite,
            ptx::LoadConstant32(GradientBounds(problem, tile.batch, tile.head) + kNonFiniteRows));
      }
    }
    const SequenceDesc& sequence = shared.descriptors.sequence;
    const int first_key = tile.tile * kKeys;
    const int end_key = MinInt(first_key + kKeys, sequence.kv_len);
    Visits visits(problem, sequence, tile, first_key, end_key, shared.visits);
    visits.Open(at.thread);
    // Under way while the rest is worked out.
    KeyRows<BackwardKernel> keys;
    keys.Fetch(problem, sequence, tile.head, first_key, at.thread);
    const int thread = ptx::Keep(at.thread);
    const HeadGains gains(problem, tile.batch, tile.head);
    if (at.thread == 0) ptx::StoreShared32(&shared.gains_differ, gains.differ);
    Work work = {problem,
                 sequence,
                 tile.batch,
                 tile.head,
                 first_key,
                 visits,
                 gains,
                 thread >= kThreads / 2 ? GradientMultiplier(problem) * PowerOfTwo(gains.lowest)
                                        : Rule::Multiplier(problem),
                 thread,
                 ptx::VoteAny(thread >= kThreads / 2),
                 {thread & 31}};
    Accumulate(work, keys, shared);
  }

 private:
  using Sums = float[kKeyTiles][kWarpDim / 16][8];  // dV or dK

  ATTN_HD static void Clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int x = 0; x < kWarpDim / 16; ++x) Math::Zero(sums[m][x]);
    }
  }
  ATTN_HD static void Multiply(float factor, Sums& sums) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kWarpDim / 16 * 8; ++n) sums[m][n >> 3][n & 7] *= factor;
    }
  }
  // ---- The block's keys. K, then V, are staged where slots and what follows the first will be.
  ATTN_HD static char* StagedKeys(Shared& shared) {
    if constexpr (kSlots == 1) return At(shared.slots, 0);
    static_assert(kSlots == 1 ||
                  (kSlots - 1) * kSlotBytes + sizeof(Shared::p) + sizeof(Shared::own_ds) >=
                      (kSharesRows ? 1 : 2) * kKeys * kRowBytes);
    return At(shared.slots, kSlotBytes);
  }
  // K or V of this warp's keys and columns, as A by rows.
  using Operand = uint32_t[kKeyTiles][kWarpChunks * 4];
  ATTN_HD static void LoadOperand(const Work& work, Shared& shared, Operand& rA) {
    const char* rows = StagedKeys(shared) + (kSharesRows ? 0 : work.role * kKeys * kRowBytes);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      const int row = work.warp_key() + m * 16 + work.lane.OperandRow();
#pragma unroll
      for (int c = 0; c < kWarpChunks; ++c) {
        const int from = work.half() * kWarpChunks + c + (kSharesRows ? work.role * 4 : 0);
        const uint4 chunk = ptx::LoadShared128(rows + ChunkOffset(row, from, kChunks));
        rA[m][c * 4] = chunk.x;
        rA[m][c * 4 + 1] = chunk.y;
        rA[m][c * 4 + 2] = chunk.z;
        rA[m][c * 4 + 3] = chunk.w;
      }
    }
  }

  // ---- The loop.
  // Where this role stands: its step and what lies where for it.
  struct StepState {
    Cursor at;
    StepPlace place;
    int slot, hand;  // bytes
    uint32_t count;  // of this role's steps before this one
    ATTN_HD explicit StepState(const Work& work)
        : at(work.visits),
          slot(!kSmall && work.role ? (kSlots - 1) * kSlotBytes : 0),
          hand(kSmall ? 0 : work.role * 4 * kHandBytes),
          count(kSmall ? 0 : -static_cast<uint32_t>(work.role)) {
      place.Bring(work.visits, at);
    }
    ATTN_HD static int NextSlot(int slot) {
      return slot == (kSlots - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
    }
    ATTN_HD void Advance() {
      slot = NextSlot(slot);
      if constexpr (!kSmall) hand ^= 4 * kHandBytes;
      ++count;
    }
    // Returns the place of a group's dS: two rounds' buffers, [key][64 queries], in small tiles
    // one.
    ATTN_HD int Ds(const Places& places, int group) const {
      if constexpr (kSmall) return places.ds ^ group * 16;
      const int column = (count % kRoundSteps * kGroups + group) * 16;
      return (count / kRoundSteps & 1) * kDsBytes + (places.ds ^ column);
    }
  };

  ATTN_HD static void Accumulate(Work& work, const KeyRows<BackwardKernel>& keys, Shared& shared) {
    StepStager<BackwardKernel> stager(work);
    stager.Bring(work);
    stager.FetchFirst(work, 0, shared);
    if (keys.Put(work.thread, work.sequence.kv_len - work.first_key, StagedKeys(shared),
                 At(shared.k, 0))) {
      ptx::StoreShared32(&shared.left_out, 1);
    }
    if (kSlots > 1) stager.Put(work, 0, 0, shared);
    stager.Bring(work);
    ptx::SyncThreads();
    if (kSlots > 1) stager.FetchFirst(work, 1, shared);
    Operand rA;
    LoadOperand(work, shared, rA);
    if (kSlots == 1) {
      ptx::SyncThreads();
      stager.Put(work, 0, 0, shared);
      stager.FetchFirst(work, 1, shared);
    }
    Sums sums;
    Clear(sums);
    const Places places(work);
    StepState step(work);
    QueryGradient<BackwardKernel> dq(work);
    int put = kSlotBytes;
    const int rounds = work.visits.rounds();
    ptx::SyncThreads();
    if constexpr (kSmall) {
      if (work.gains.differ && work.role == 1) TakeGain<BackwardKernel>(work, 0, shared);
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
        work.visits.Advance(round, work.thread);
        const auto here = step.place.Read(work.visits, step.at);
        Step(work, step, here, places, rA, shared, sums);
        step.at.template Advance<kStepRows>(work.visits, here);
        step.place.Bring(work.visits, step.at);
        stager.Bring(work);
        if (kSlots > 1) stager.Put(work, put, round + 1, shared);
        step.Advance();
        put = StepState::NextSlot(put);
        ptx::SyncThreads();  // dS is there, and the next step
        // Longer rows have one slot, which leaves room for one more block an SM.
        if (kSlots == 1) stager.Put(work, 0, round + 1, shared);
        if (work.gains.differ) TakeGains(work, round + 1, stager, shared, sums);
        stager.Fetch(work);
        dq.Add(work, round, places, shared);
        if (kSlots == 1) ptx::SyncThreads();
      }
      return Finish(work, shared, sums);
    }
    // The second role works on the step before. A round's dQ is added by the first role at the head
    // of the step after next, by the second at its end, so that one multiplies while the other
    // adds.
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      work.visits.Advance(round, work.thread);
#pragma unroll 1
      for (int n = 0; n < kRoundSteps; ++n) {
        if (step.count < static_cast<uint32_t>(rounds * kRoundSteps)) {
          const auto here = step.place.Read(work.visits, step.at);
          Step(work, step, here, places, rA, shared, sums);
          step.at.template Advance<kStepRows>(work.visits, here);
        }
        step.place.Bring(work.visits, step.at);
        stager.Bring(work);
        // From shared memory, and not waited for yet: in a register it would cost the loop 2 %.
        const uint32_t gains_differ = ptx::LoadShared32(&shared.gains_differ);
        stager.Put(work, put, round * kRoundSteps + n + 1, shared);
        step.Advance();
        put = StepState::NextSlot(put);
        if (work.role == 0) ptx::SyncThreads();
        if (gains_differ) TakeGains(work, round * kRoundSteps + n, stager, shared, sums);
        stager.Fetch(work);
        if (n == work.role && round > 0) {
          dq.Add(work, round - 1, places, shared);
          if (round == rounds) break;
        }
        if (work.role == 1) ptx::SyncThreads();
      }
    }
    Finish(work, shared, sums);
  }
  // Where gains differ, between two steps: `next` is the second role's.
  ATTN_HD static void TakeGains(Work& work, int next, StepStager<BackwardKernel>& stager,
                                Shared& shared, Sums& sums) {
    if (work.role == 1) {
      const float factor = TakeGain<BackwardKernel>(work, next, shared);
      if (ptx::VoteAny(factor != 1)) Multiply(factor, sums);
    }
    stager.TakeGain(work, next + (kSmall ? 1 : 2), shared);
  }
  ATTN_HD static void Finish(const Work& work, const Shared& shared, const Sums& sums) {
    WriteKeyGradients(work, sums);
    if (ptx::LoadShared32(&shared.left_out)) QueryGradient<BackwardKernel>::MarkNonFiniteKeys(work);
  }

  template <class StepAt>
  ATTN_HD static void Step(const Work& work, const StepState& step, const StepAt& here,
                           const Places& places, const Operand& rA, Shared& shared, Sums& sums) {
    // A block's last keys may lie beyond the sequence, where general scores know nothing.
    const bool is_cut = here.visit.IsCut() || work.first_key + kKeys > work.sequence.kv_len;
    const bool partial = here.visit.IsPartial() || (Rule::kEveryTile && is_cut);
    const int head = step.at.template Head<kStepRows>(work.visits);
    const ScoreContext at = work.At(head);
    bool non_finite = false;
    if constexpr (kSmall) {
      non_finite = partial && ptx::LoadShared32(&shared.non_finite) != 0;
    } else if constexpr (Rule::kEveryTile) {
      // A look into shared memory would cost these scores a point and 68 spilled bytes.
      if (here.visit.HasNonFiniteRows()) LeaveOut(work, step, shared);
    } else if (partial) {
      ptx::SyncWarp();  // keeps this a branch
      non_finite = ptx::LoadShared32(&shared.non_finite) != 0;
      // Either is uniform; the figures of one kernel are better without the vote.
      if (kStoresPLate ? non_finite : ptx::VoteAny(non_finite)) LeaveOut(work, step, shared);
    }
    const uint32_t mask = Masked(work, step, here);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const int slot = step.slot + group * kGroupRows * kRowBytes;
      float rS[kKeyTiles][8];
      Product(rA, shared.slots, places.columns + slot, rS);
      if constexpr (kSplit > 1) AddOtherHalf(work, shared, rS);
      if (kSmall && ptx::VoteAny(non_finite)) {
        ptx::SyncThreads();  // the other role multiplies what this one changes
        LeaveOutGroup(work, slot, shared);
      }
      char* hand = At(shared.p, step.hand + places.hand + group * kKeyTiles * 512);
      char* ds = At(shared.ds(), step.Ds(places, group));
      char* slopes = kSplit == 1 ? ds : At(shared.slopes, step.hand + places.hand);
      uint32_t visible = 0xffffffffu;
      if ((Rule::kEveryTile || partial) && work.role == 0) {
        const Hidden hidden = {is_cut, Shown(work, mask, here.row + group * kGroupRows)};
        visible = ApplyRule(work, at, here.row + group * kGroupRows, hidden, slopes, rS);
      }
      float2 rows[2];  // of the lane's queries: stabiliser or delta
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        rows[k] = ptx::LoadSharedFloat2(
            At(shared.slots, step.slot + places.row + (group * kGroupRows + k * 8) * 4));
      }
      Subtract(work.multiplier, rows, rS);
      uint32_t words[kKeyTiles][4];   // [k step][key], pairs of queries
      uint32_t marked[kKeyTiles][4];  // the same of P, dropped scores by their sign
      if (work.role == 0) {
        MakeP(rS, words);
        // A row whose lse is NaN must not reach the keys that it does not see.
        if (partial) HideInvisible(visible, words);
        Drop(work, head, here.row + group * kGroupRows, words, marked);
        if (!kStoresPLate) StoreP(marked, hand);
        if constexpr (kSmall) ptx::BarrierArrive(HandBarrier(work, group), 2 * kWarpLanes);
      } else {
        if constexpr (kSmall) ptx::BarrierSync(HandBarrier(work, group), 2 * kWarpLanes);
        MakeDs<DropoutPolicy>(rS, rows, hand, words);
        if (partial || Rule::HasSlope(work.problem)) HideZeros(work, hand, slopes, words);
      }
      const Left left = {hand, ds};
      AddProduct(work, words, marked, left, shared.slots, slot, places, sums);
    }
  }

  ATTN_HD static int HandBarrier(const Work& work, int group) {
    return kHandBarrier + work.role_warp() * kGroups + group;
  }

  // Infinities and NaN of what this role multiplies by P or dS in this step
  // (rules/non_finite_rows.h). By all warps of a role.
  ATTN_HD static void LeaveOut(const Work& work, const StepState& step, Shared& shared) {
    constexpr int kRoleThreads = kThreads / 2;
    char* tile = At(shared.slots, step.slot + (work.role ? 0 : kTileBytes));
#pragma unroll 1
    for (int n = (work.thread & (kRoleThreads - 1)) * 16; n < kTileBytes; n += kRoleThreads * 16) {
      ptx::StoreShared128(tile + n, FiniteHalves(ptx::LoadShared128(tile + n)));
    }
    ptx::BarrierSync(kRoleBarrier + work.role, kRoleThreads);
  }

  // The same of a group of a small tile, at `slot`, after both roles' first products.
  ATTN_HD static void LeaveOutGroup(const Work& work, int slot, Shared& shared) {
    constexpr int kRoleThreads = kThreads / 2;
    const int first = kRoleWarps == 1 ? work.lane.index : work.thread & (kRoleThreads - 1);
#pragma unroll 1
    for (int n = first; n < kGroupRows * kRowChunks; n += kRoleThreads) {
      const int place = slot + ChunkOffset(n / kRowChunks, n % kRowChunks, kChunks);
      char* chunk = At(shared.slots, work.role ? place : Second(place, kStepRows));
      ptx::StoreShared128(chunk, FiniteHalves(ptx::LoadShared128(chunk)));
    }
    if constexpr (kRoleWarps == 1) {
      ptx::SyncWarp();
    } else {
      ptx::BarrierSync(kRoleBarrier + work.role, kRoleThreads);
    }
  }

  // Sᵀ or dPᵀ: one LDS.128 is the B operand of two k steps for all key tiles.
  ATTN_HD static void Product(const Operand& rA, const void* tiles, int offset,
                              float (&rS)[kKeyTiles][8]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) Math::Zero(rS[m]);
#pragma unroll
    for (int n = 0; n < kWarpChunks; ++n) {
      uint4 b = ptx::LoadShared128(At(tiles, (offset ^ (n & 7) * 16) + (n >> 3) * 128));
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        ptx::MmaRowCol(rS[m], rA[m][n * 4], rA[m][n * 4 + 1], b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        ptx::MmaRowCol(rS[m], rA[m][n * 4 + 2], rA[m][n * 4 + 3], b.z, b.w);
      }
    }
  }

  // Both warps of the same keys get the same sum.
  ATTN_HD static void AddOtherHalf(const Work& work, Shared& shared, float (&rS)[kKeyTiles][8]) {
    static_assert(kSplit == 1 || (kKeyTiles == 1 && kGroups == 1), "a warp's place for one tile");
    char* own = At(shared.partial, work.warp() * 1024 + work.lane.index * 16);
    const char* others = At(shared.partial, (work.warp() ^ 1) * 1024 + work.lane.index * 16);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::StoreShared128(
          own + n * 512,
          make_uint4(ptx::FloatBits(rS[0][4 * n]), ptx::FloatBits(rS[0][4 * n + 1]),
                     ptx::FloatBits(rS[0][4 * n + 2]), ptx::FloatBits(rS[0][4 * n + 3])));
    }
    ptx::BarrierSync(1 + (work.warp() >> 1), 2 * kWarpLanes);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint4 other = ptx::LoadShared128(others + n * 512);
      rS[0][4 * n] += ptx::BitsFloat(other.x);
      rS[0][4 * n + 1] += ptx::BitsFloat(other.y);
      rS[0][4 * n + 2] += ptx::BitsFloat(other.z);
      rS[0][4 * n + 3] += ptx::BitsFloat(other.w);
    }
  }

  // dV multiplies what was kept; the other role gets P with dropped scores marked by their sign.
  ATTN_HD static void Drop(const Work& work, int head, int first_row,
                           uint32_t (&words)[kKeyTiles][4], uint32_t (&marked)[kKeyTiles][4]) {
    DropoutPolicy dropout(work.At(head), first_row, work.first_key + work.warp_key(),
                          work.lane.index);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t keep = dropout.KeepPair(m, n >> 1, n & 1);
        marked[m][n] = words[m][n] | (~keep & 0x80008000u);
        words[m][n] &= keep;
      }
    }
  }

  // Under a softcap its derivative is left for the other role: where dS will be, or beside P.
  static constexpr int kSlopeStride = 16 * 128;
  // Hidden tells which scores of a group are hidden: by place, and by the mask, of which bit 8m + e
  // shows element e of key tile m.
  struct Hidden {
    bool is_cut;
    uint32_t shown;
  };
  // This lane's bits of a step's 32 queries (of the 32 that it is in), under way while its first
  // product is made.
  template <class StepAt>
  ATTN_HD static uint32_t Masked(const Work& work, const StepState& step, const StepAt& here) {
    if constexpr (Rule::kListed) {
      if (ptx::VoteAny(here.visit.IsMasked() && work.role == 0)) {
        constexpr uint32_t kWords = BitmapWords(kRoundRows, kKeys);
        const int square = SquareOf(here.row % kRoundRows, work.warp_key(), kKeys);
        const uint32_t bitmap = step.at.template Bitmap<kStepRows>(work.visits);
        return ptx::LoadConstant32(work.problem.tile_lists.bitmaps + uint64_t{bitmap} * kWords +
                                   square + work.lane.index);
      }
    }
    return ~0u;
  }
  ATTN_HD static uint32_t Shown(const Work& work, uint32_t mask, int row) {
    if constexpr (!Rule::kListed) return ~0u;
    return mask >> ((row & 16) + (work.warp_key() & 16) / 2);  // a byte is one tile of 16×16
  }
  // Bit 8m + e of the result tells whether element e of key tile m is visible; others become 0.
  ATTN_HD static uint32_t ApplyRule(const Work& work, const ScoreContext& at, int first_row,
                                    const Hidden& hidden, char* slopes, float (&rS)[kKeyTiles][8]) {
    const int lane = ptx::Keep(work.lane.index);
    constexpr int kPairs = 4 * kKeyTiles;
    ScorePlace pairs[kPairs];
    float scores[kPairs][2], slope[kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int m = n >> 2, e = 2 * (n & 3);
      pairs[n] = {first_row + Math::Col(e, lane),
                  work.first_key + work.warp_key() + m * 16 + Math::Row(e, lane)};
      scores[n][0] = rS[m][e];
      scores[n][1] = rS[m][e + 1];
    }
    const uint32_t visible = Rule::template ApplyAll<Along::kRows>(at, pairs, hidden.is_cut,
                                                                   hidden.shown, scores, slope);
    // Listed scores that are hidden are cut out of P (HideInvisible), whatever it is.
    if constexpr (Rule::kListed && !Rule::kEveryTile) return visible;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      rS[n >> 3][n & 7] = visible >> n & 1 ? scores[n >> 1][n & 1] : 0.0f;
    }
    if (Rule::HasSlope(work.problem)) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          words[n] = ptx::PackRounded(slope[4 * m + n][0], slope[4 * m + n][1]);
        }
        ptx::StoreShared128(slopes + m * kSlopeStride,
                            make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    return visible;
  }
  // PARTIAL tiles: 0·NaN of an invisible score is no gradient; and the softcap's derivative.
  ATTN_HD static void HideZeros(const Work& work, const char* hand, const char* slopes,
                                uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      // Opaque, so that this stays a branch of its own.
      const uint4 handed = ptx::LoadShared128(hand + ptx::Keep(m * 512));
      const uint32_t p[4] = {handed.x, handed.y, handed.z, handed.w};
      if (Rule::HasSlope(work.problem)) MultiplySlope(slopes + m * kSlopeStride, words[m]);
#pragma unroll
      for (int n = 0; n < 4; ++n) words[m][n] &= NonZeroHalves(p[n] & 0x7fff7fffu);
    }
  }
  // Returns where a group leaves what others need: P for the second role, dS for dQ.
  struct Left {
    char *hand, *ds;
  };
  // dV += (P∘Z)ᵀ·dO or dK += dSᵀ·Q. Lanes n and n ^ 2 swap rows and n ^ 4 the other column half's
  // queries, which turns accumulators into an A operand.
  ATTN_HD static void AddProduct(const Work& work, const uint32_t (&words)[kKeyTiles][4],
                                 const uint32_t (&marked)[kKeyTiles][4], const Left& left,
                                 const void* tiles, int offset, const Places& places, Sums& sums) {
    const bool second = work.lane.index & 2;
    uint32_t a[kKeyTiles][2][2][2];  // own or other queries, k step, register
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t keep = second ? words[m][k * 2 + 1] : words[m][k * 2];
        const uint32_t got = ptx::ShuffleXor(second ? words[m][k * 2] : words[m][k * 2 + 1], 2);
        a[m][0][k][0] = second ? got : keep;
        a[m][0][k][1] = second ? keep : got;
        a[m][1][k][0] = ptx::ShuffleXor(a[m][0][k][0], 4);
        a[m][1][k][1] = ptx::ShuffleXor(a[m][0][k][1], 4);
      }
    }
#pragma unroll
    for (int other = 0; other < 2; ++other) {
      // Stored under the products of the first half: 2 % faster than before them.
      if (kStoresPLate && other == 1 && work.role == 0) StoreP(marked, left.hand);
      if (other == 1 && work.role == 1 && work.half() == 0) StoreDs(a, left.ds);
      const int from = offset + (other ? places.other : places.own);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int n = 0; n < kWarpChunks / 4; ++n) {
          // k step 1 is eight rows on, which twists by two chunks.
          const int twist = ((n & 1) * 4) ^ (k * 2);
          uint4 b = ptx::LoadShared128(
              At(tiles, (from ^ twist * 16) + (n >> 1) * 128 + k * 8 * kRowBytes));
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
            ptx::MmaRowRow(sums[m][2 * n], a[m][other][k][0], a[m][other][k][1], b.x, b.y);
          }
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
            ptx::MmaRowRow(sums[m][2 * n + 1], a[m][other][k][0], a[m][other][k][1], b.z, b.w);
          }
        }
      }
    }
  }

  // ---- dK, dV.
  ATTN_HD static void WriteKeyGradients(const Work& work, const Sums& sums) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const RowTensor t = work.role ? p.d_k : p.d_v;
    const int live_chunks = work.role ? p.qk_chunks : p.v_chunks;
    const GradientWriter writer =
        work.role ? GradientWriter(p, p.scale * (1.0f + kTruncationLoss),
                                   p.d_k_exponent - GainOfSums<BackwardKernel>(work))
                  : GradientWriter(p, p.dropout_scale, p.d_v_exponent - kProbabilityShift);
    const bool is_run = Rule::kListed && IsRun(p);
    const char* first = RowOf(t, s.batch, work.kv_head, s.kv_begin);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row =
            work.first_key + work.warp_key() + m * 16 + Math::Row(2 * r, work.lane.index);
        char* out = const_cast<char*>(ptx::Offset(first, row, static_cast<int>(t.row_stride * 2)));
#pragma unroll
        for (int x = 0; x < kWarpDim / 16; ++x) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int e = Math::Element(r, 2 * half);
            const int chunk =
                work.half() * kWarpChunks + (x >> 1) * 4 + work.lane.column_half() * 2 + half;
            const int column = chunk * 8 + (x & 1) * 4 + (work.lane.index & 2);
            if (row >= s.kv_len || chunk >= live_chunks) continue;
            const float low = sums[m][x][e], high = sums[m][x][e + 1];
            if (is_run) {
              ptx::StoreGlobal64(out + column * 4, writer.Floats(low, high));
            } else {
              ptx::StoreGlobal32(out + column * 2, writer.Pack(low, high));
            }
          }
        }
      }
    }
  }
};

}  // namespace attnd::sm70
