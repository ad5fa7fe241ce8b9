// Gradients of attention for one tile of keys, in one pass over the queries that see them.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// Roles: warps 0-3 make Sᵀ, P and dV of their keys (K in registers), warps 4-7 one step behind dPᵀ,
// dS and dK of the same keys (V in registers). A step is 32 queries; after every second one all
// eight warps turn 64 queries of dS into their share of dQ and add it to a float32 workspace in
// lane order (each addition one full line); DqKernel puts that into place.
//
// Both roles run the same code for their products, with Q and dO swapped; only the arithmetic
// between branches. P reaches the second role in accumulator layout, a dropped score marked by its
// sign; dS is stored [key][64 queries], so that dQ reads it as A by columns and K as B by rows.
// With GQA a block goes through all query heads of its KV head: dK and dV are sums over the group.
//
// Order of dQ's additions: InKeyOrder (the default) adds tile by tile from the last key to the
// first, each block waiting for the turn of its 64 queries; blocks start in that order, so none
// waits for one that has not started, and the result is the same bits every time. AnyOrder adds as
// it comes. The split into two kernels (seven products instead of five) costs more than waiting.
// Rows   without visible keys (lse = −inf) have P = 0. Invisible scores have P = dS = 0 by
//        selection; what lies in an invisible row of K or V reaches nothing.
// Inputs float16; rows as kernels/params.h says. Errors: none.
// Source Dao 2023 (FlashAttention-2), Algorithm 2; docs/KERNELS.md has figures and what lost.
#pragma once

#include "kernels/online_softmax.h"
#include "kernels/sm70/backward_dropout.h"
#include "kernels/sm70/backward_passes.h"
#include "kernels/sm70/pipeline.h"
#include "kernels/tile_iterator.h"

namespace attnd::sm70 {

// float16 reaches down to 6e-8 only, so P is kept as P·2^10 (at most 1025) and dS as
// kernels/gradient_scale.h says; the last factors take it back. Powers of two, so no bits are lost.
inline constexpr int kProbabilityShift = 10;

// How blocks take turns at 64 queries of dQ; `turn` counts the key tiles added so far.
struct InKeyOrder {
  ATTN_HD static void Wait(const int32_t* turn, int expected) {
    while (ptx::LoadAcquire(turn) != expected) {
    }
  }
  ATTN_HD static void Pass(int32_t* turn, int next) { ptx::StoreRelease(turn, next); }
};
struct AnyOrder {
  ATTN_HD static void Wait(const int32_t*, int) {}
  ATTN_HD static void Pass(int32_t*, int) {}
};

template <Tile kTile, class Rule, class Dropper, class Order>
struct BackwardKernel {
  using Math = Float32Accumulate;
  static constexpr int kThreads = 256;
  static constexpr int kHeadDim = kTile.head_dim, kChunks = kHeadDim / 8;
  static constexpr int kKeys = kTile.kv_rows;   // of the block
  static constexpr int kKeyTiles = kKeys / 64;  // of 16 keys, for a warp
  static constexpr int kWarpKeys = 16 * kKeyTiles;
  static constexpr int kStepRows = 32, kGroupRows = 16, kGroups = 2;
  static constexpr int kSlots = 3;
  using Dq = DqLayout<kHeadDim>;
  static_assert(kTile.q_rows == kStepRows && kKeys % 64 == 0 && kDqBlockRows == 2 * kStepRows);

  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kTileBytes = kStepRows * kRowBytes;
  static constexpr int kSlotBytes = 2 * kTileBytes;             // Q, then dO
  static constexpr int kHandBytes = kKeyTiles * kGroups * 512;  // P of one warp and step
  static constexpr int kDsBytes = kKeys * 128;                  // dS of 64 queries
  struct alignas(128) Shared {
    uint4 k[kKeys * kChunks];
    uint4 slots[kSlots][2][kStepRows * kChunks];
    uint4 p[2][4][kHandBytes / 16];
    uint4 ds[2][kDsBytes / 16];
    float rows[kSlots][2][kStepRows];  // stabiliser of P, then delta
    Descriptors descriptors;
    int left_out;  // whether K held an infinity or NaN
  };
  static_assert(sizeof(Shared) * kTile.blocks_per_sm <= 96 * 1024, "Volta has 96 KiB an SM");

  // 64 queries of one query head.
  struct Pair {
    int head, visit;
  };

  struct Work {
    const ProblemDesc& problem;
    const SequenceDesc& sequence;
    int batch, kv_head, first_key;
    TileVisits tiles;
    float gain;              // dS is P·2^kProbabilityShift times (Z∘dP − delta)·gain
    int thread, warp, role;  // role 0: P and dV, 1: dS and dK
    Lane lane;
    ATTN_HD int role_warp() const { return warp & 3; }
    ATTN_HD int pairs() const { return tiles.count() * problem.group; }
    ATTN_HD Pair First() const { return {kv_head * problem.group, 0}; }
    ATTN_HD Pair After(Pair pair) const {
      if (pair.visit + 1 < tiles.count()) return {pair.head, pair.visit + 1};
      return {pair.head + 1, 0};
    }
    ATTN_HD ScoreContext At(int head) const { return {problem, sequence, batch, head}; }
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
    Work work = {problem,
                 sequence,
                 tile.batch,
                 tile.head,
                 first_key,
                 RowTiles(VisibilityOf(sequence), first_key, end_key, kDqBlockRows,
                          Rule::AllPartial(problem)),
                 PowerOfTwo(GradientExponent(problem, tile.batch, tile.head) - kProbabilityShift),
                 at.thread,
                 at.thread >> 5,
                 at.thread >> 7,
                 {at.thread & 31}};
    Sums sums;
    Clear(sums);
    if (work.tiles.count() > 0) Accumulate(work, shared, sums);
    WriteKeyGradients(work, sums);
  }

 private:
  using Sums = float[kKeyTiles][kHeadDim / 16][8];  // dV or dK

  ATTN_HD static void Clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int x = 0; x < kHeadDim / 16; ++x) Math::Zero(sums[m][x]);
    }
  }
  ATTN_HD static const char* RowsOf(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
    return static_cast<const char*>(t.data) +
           2 * (batch * t.batch + head * t.head + row * t.row_stride);
  }
  ATTN_HD static char* At(void* base, int offset) { return static_cast<char*>(base) + offset; }
  ATTN_HD static const char* At(const void* base, int offset) {
    return static_cast<const char*>(base) + offset;
  }

  // ---- Staging: all 256 threads bring 32 rows of Q and of dO, and their lse and delta.
  struct Stager {
    static constexpr int kRowsAPass = kThreads / kChunks, kPasses = kStepRows / kRowsAPass;
    uint4 q[kPasses], d_o[kPasses];
    float value;    // lse (threads 0..31) or delta (32..63) of row thread & 31
    int place;      // of this thread's chunk in a tile
    int first_row;  // of what is held

    ATTN_HD explicit Stager(const Work& work) {
      place = ptx::Keep(ChunkOffset(work.thread / kChunks, work.thread % kChunks, kChunks));
#pragma unroll
      for (int n = 0; n < kPasses; ++n) q[n] = d_o[n] = make_uint4(0, 0, 0, 0);
      value = 0;
      first_row = 0;
    }
    ATTN_HD void Fetch(const Work& work, Pair pair, int half) {
      const ProblemDesc& p = work.problem;
      const SequenceDesc& s = work.sequence;
      first_row = work.tiles.First(pair.visit) + half * kStepRows;
      const int chunk = work.thread % kChunks, row = first_row + work.thread / kChunks;
      const char* from_q = RowsOf(p.q, s.batch, pair.head, s.q_begin) + chunk * 16;
      const char* from_o = RowsOf(p.d_o, s.batch, pair.head, s.q_begin) + chunk * 16;
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        const int at = MinInt(row + n * kRowsAPass, s.q_len - 1);
        ptx::LoadConstant128If(q[n], ptx::Offset(from_q, at, static_cast<int>(p.q.row_stride * 2)),
                               chunk < p.qk_chunks);
        ptx::LoadConstant128If(d_o[n],
                               ptx::Offset(from_o, at, static_cast<int>(p.d_o.row_stride * 2)),
                               chunk < p.v_chunks);
      }
      if (work.thread < 2 * kStepRows) {
        const float* from = work.thread < kStepRows ? p.lse : p.delta;
        const int at = MinInt(first_row + (work.thread & 31), s.q_len - 1);
        value = ptx::LoadConstantFloat(from + s.batch * p.lse_batch + pair.head * p.lse_head +
                                       s.q_begin + at);
      }
    }
    // Rows beyond the sequence become zero, with P = 0.
    ATTN_HD void Put(const Work& work, int slot, Shared& shared) const {
      const int rows = work.sequence.q_len - first_row;
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        const bool exists = work.thread / kChunks + n * kRowsAPass < rows;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const int twist = Twist(n * kRowsAPass) * 16;
        char* to =
            At(shared.slots, slot * kSlotBytes + (place ^ twist) + n * kRowsAPass * kRowBytes);
        ptx::StoreShared128(to, exists ? q[n] : zero);
        ptx::StoreShared128(to + kTileBytes, exists ? d_o[n] : zero);
      }
      if (work.thread < 2 * kStepRows) {
        const bool is_lse = work.thread < kStepRows, exists = (work.thread & 31) < rows;
        ptx::StoreSharedFloat(
            &shared.rows[slot][is_lse ? 0 : 1][work.thread & 31],
            is_lse ? StabilizerOf(value, exists) : (exists ? value * work.gain : 0.0f));
      }
    }
    ATTN_HD static float StabilizerOf(float lse, bool exists) {
      if (!exists || lse == -Infinity()) return Infinity();
      return ptx::Fma(lse, kLog2E, -(kTruncationBias + kProbabilityShift));
    }
  };

  // K for dQ's product. Rows beyond the sequence, infinities and NaN are zero there; SpoilDq tells
  // the rows that see the latter.
  ATTN_HD static void BringKeys(const Work& work, Shared& shared) {
    uint32_t met = 0;
#pragma unroll 1
    for (int n = work.thread; n < kKeys * kChunks; n += kThreads) {
      const int row = n / kChunks, chunk = n % kChunks;
      uint4 words = KeyChunk(work, row, chunk);
      const uint4 bad = make_uint4(NonFiniteHalves(words.x), NonFiniteHalves(words.y),
                                   NonFiniteHalves(words.z), NonFiniteHalves(words.w));
      met |= bad.x | bad.y | bad.z | bad.w;
      words = make_uint4(words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w);
      ptx::StoreShared128(At(shared.k, ChunkOffset(row, chunk, kChunks)), words);
    }
    if (met) ptx::StoreShared32(&shared.left_out, 1);
  }
  ATTN_HD static uint4 KeyChunk(const Work& work, int row, int chunk) {
    const SequenceDesc& s = work.sequence;
    if (work.first_key + row >= s.kv_len || chunk >= work.problem.qk_chunks) {
      return make_uint4(0, 0, 0, 0);
    }
    return ptx::LoadConstant128(
        RowsOf(work.problem.k, s.batch, work.kv_head, int64_t{s.kv_begin} + work.first_key + row) +
        chunk * 16);
  }

  using Operand = uint32_t[kKeyTiles][kChunks * 4];  // K or V of this warp's keys, as A by rows
  ATTN_HD static void LoadOperand(const Work& work, Operand& rA) {
    const SequenceDesc& s = work.sequence;
    const RowTensor& t = work.role ? work.problem.v : work.problem.k;
    const int live = work.role ? work.problem.v_chunks : work.problem.qk_chunks;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      const int row =
          MinInt(work.first_key + work.role_warp() * kWarpKeys + m * 16 + work.lane.OperandRow(),
                 s.kv_len - 1);
      const char* data = RowsOf(t, s.batch, work.kv_head, int64_t{s.kv_begin} + row);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint4 chunk = make_uint4(0, 0, 0, 0);
        ptx::LoadConstant128If(chunk, data + c * 16, c < live);
        rA[m][c * 4] = chunk.x;
        rA[m][c * 4 + 1] = chunk.y;
        rA[m][c * 4 + 2] = chunk.z;
        rA[m][c * 4 + 3] = chunk.w;
      }
    }
  }

  // ---- The loop.
  // Byte offsets of this lane's operands in shared memory.
  struct Places {
    int columns;     // B by columns: query OperandKey, chunk 0
    int own, other;  // B by rows: queries of the own or other column half, the lane's chunk
    int row;         // query of the lane's first column, in a group
    int hand;        // of P, within a slot
    int ds;          // of dS: key OperandRow of tile 0, chunk of its column half
    ATTN_HD explicit Places(const Work& work) {
      const Lane lane = work.lane;
      const int chunk = lane.column_half() * 2 + lane.upper();
      const int own_row = lane.quad() | lane.column_half() << 2;
      columns = ptx::Keep(ChunkOffset(lane.OperandKey(), 0, kChunks));
      own = ptx::Keep(ChunkOffset(own_row, chunk, kChunks));
      other = ptx::Keep(ChunkOffset(own_row ^ 4, chunk, kChunks));
      row = ptx::Keep(Math::Col(0, lane.index));
      hand = ptx::Keep(work.role_warp() * kHandBytes + lane.index * 16);
      ds = ptx::Keep(
          ChunkOffset(work.role_warp() * kWarpKeys + lane.OperandRow(), lane.column_half() * 4, 8));
    }
  };

  ATTN_HD static void Accumulate(const Work& work, Shared& shared, Sums& sums) {
    Operand rA;
    LoadOperand(work, rA);
    BringKeys(work, shared);
    Stager stager(work);
    const int pairs = work.pairs();
    Pair before = work.First(), now = before, next = work.After(now);
    stager.Fetch(work, now, 0);
    stager.Put(work, 0, shared);
    stager.Fetch(work, now, 1);
    const Places places(work);
    int slot = 0;  // of this step
    ptx::SyncThreads();
    for (int pair = 0; pair <= pairs; ++pair) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const bool is_active =
            work.role == 0 ? pair < pairs : pair * 2 + half >= 1 && pair * 2 + half <= 2 * pairs;
        if (is_active) {
          // The second role works on the step before.
          const Pair of = work.role && half == 0 ? before : now;
          const int own_slot = work.role ? (slot == 0 ? kSlots - 1 : slot - 1) : slot;
          Step(work, of, half ^ work.role, pair - (work.role && half == 0), own_slot, places, rA,
               shared, sums);
        }
        slot = slot == kSlots - 1 ? 0 : slot + 1;
        if (pair < pairs) {
          stager.Put(work, slot, shared);
          stager.Fetch(work, pair + 1 < pairs ? next : now, half);
        }
        if (half == 1 && pair > 0 && work.thread == 0) {
          Order::Wait(TurnOf(work, before), TurnsBefore(work, before));
        }
        ptx::SyncThreads();
        if (half == 0 && pair > 1 && work.thread == 0) PassTurn(work, pair - 2);
      }
      if (pair > 0) AddDq(work, before, (pair - 1) & 1, shared);
      // The softcap's derivative is about to be left where dS of two pairs ago was just read.
      if (Rule::HasSlope(work.problem)) ptx::SyncThreads();
      before = now;
      now = next;
      next = work.After(next);
    }
    ptx::SyncThreads();
    if (work.thread == 0) PassTurn(work, pairs - 1);
    if (ptx::LoadShared32(&shared.left_out)) SpoilDq(work);
  }

  // `half` of pair `pair` (64 queries), in `slot`.
  ATTN_HD static void Step(const Work& work, Pair of, int half, int pair, int slot,
                           const Places& places, const Operand& rA, Shared& shared, Sums& sums) {
    const int first = slot * kSlotBytes + (work.role ? kTileBytes : 0);   // dO or Q
    const int second = slot * kSlotBytes + (work.role ? 0 : kTileBytes);  // Q or dO
    const int first_row = work.tiles.First(of.visit) + half * kStepRows;
    const bool partial = Rule::kEveryTile || work.tiles.IsPartial(of.visit);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      float rS[kKeyTiles][8];
      Product(rA, shared.slots, places.columns + first + group * kGroupRows * kRowBytes, rS);
      uint32_t words[kKeyTiles][4];  // [k step][key], pairs of queries
      const float* rows = &shared.rows[slot][work.role][group * kGroupRows + places.row];
      char* hand = At(shared.p, half * 4 * kHandBytes + places.hand + group * kKeyTiles * 512);
      const int ds = (pair & 1) * kDsBytes + (places.ds ^ (half * 2 + group) * 16);
      if (work.role == 0) {
        MakeP(work, of.head, first_row + group * kGroupRows, partial, rS, rows, hand,
              At(shared.ds, ds), words);
      } else {
        MakeDs(work, partial, rS, rows, hand, At(shared.ds, ds), words);
      }
      AddProduct(work.lane, words, work.role == 1, At(shared.ds, ds), shared.slots,
                 second + group * kGroupRows * kRowBytes, places, sums);
    }
  }

  // Sᵀ or dPᵀ: one LDS.128 is the B operand of two k steps for all key tiles.
  ATTN_HD static void Product(const Operand& rA, const void* tiles, int offset,
                              float (&rS)[kKeyTiles][8]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) Math::Zero(rS[m]);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
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

  // P, and what dV multiplies it as: without what dropout took. The other role gets P with dropped
  // scores marked by their sign and, under a softcap, its derivative where dS will be.
  ATTN_HD static void MakeP(const Work& work, int head, int first_row, bool partial,
                            float (&rS)[kKeyTiles][8], const float* rows, char* hand, char* ds,
                            uint32_t (&words)[kKeyTiles][4]) {
    const float multiplier = Rule::Multiplier(work.problem);
    if (partial) ApplyRule(work, head, first_row, ds, rS);
    Dropper dropper(work.At(head), first_row, work.first_key + work.role_warp() * kWarpKeys,
                    work.lane.index);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 lse = ptx::LoadSharedFloat2(rows + k * 8);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int e = Math::Element(r, 2 * k);
          float low = ptx::Exp2(ptx::Fma(rS[m][e], multiplier, -lse.x));
          float high = ptx::Exp2(ptx::Fma(rS[m][e + 1], multiplier, -lse.y));
          words[m][k * 2 + r] = ptx::PackTruncated(low, high);
        }
      }
    }
    // A row whose lse is NaN must not reach the keys that it does not see.
    if (partial) HideInvisible(rS, words);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      uint32_t marked[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t keep = dropper.KeepPair(m, n >> 1, n & 1);
        marked[n] = words[m][n] | (~keep & 0x80008000u);
        words[m][n] &= keep;
      }
      ptx::StoreShared128(hand + m * 512, make_uint4(marked[0], marked[1], marked[2], marked[3]));
    }
  }

  ATTN_HD static void HideInvisible(const float (&rS)[kKeyTiles][8],
                                    uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int e = Math::Element(n & 1, n & 2);
        if (rS[m][e] == -Infinity()) words[m][n] &= 0xffff0000u;
        if (rS[m][e + 1] == -Infinity()) words[m][n] &= 0x0000ffffu;
      }
    }
  }

  ATTN_HD static void ApplyRule(const Work& work, int head, int first_row, char* ds,
                                float (&rS)[kKeyTiles][8]) {
    const int lane = ptx::Keep(work.lane.index);
    const ScoreContext at = work.At(head);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      float slope[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int key = work.first_key + work.role_warp() * kWarpKeys + m * 16 + Math::Row(e, lane);
        const int row = first_row + Math::Col(e, lane);
        slope[e] = Rule::Slope(at, rS[m][e]);
        const Scored scored = Rule::Apply(at, row, key, rS[m][e]);
        // −infinity now means invisible, so a visible one becomes a number with P = 0.
        rS[m][e] = scored.visible && scored.score == -Infinity() ? kLowest : scored.score;
      }
      if (Rule::HasSlope(work.problem)) {
        ptx::StoreShared128(
            ds + m * 16 * 128,
            make_uint4(ptx::PackRounded(slope[0], slope[1]), ptx::PackRounded(slope[2], slope[3]),
                       ptx::PackRounded(slope[4], slope[5]), ptx::PackRounded(slope[6], slope[7])));
      }
    }
  }

  // dS = P∘(Z∘dP − delta), in float16.
  ATTN_HD static void MakeDs(const Work& work, bool partial, const float (&rS)[kKeyTiles][8],
                             const float* rows, const char* hand, const char* ds,
                             uint32_t (&words)[kKeyTiles][4]) {
    const float gain = work.gain * Dropper::Factor(work.problem);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      const uint4 handed = ptx::LoadShared128(hand + m * 512);
      const uint32_t p[4] = {handed.x, handed.y, handed.z, handed.w};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 delta = ptx::LoadSharedFloat2(rows + k * 8);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int e = Math::Element(r, 2 * k);
          const uint32_t pair = p[k * 2 + r];
          float low = ptx::Fma(Dropper::Kept(pair & 0x8000u, rS[m][e]), gain, -delta.x);
          float high = ptx::Fma(Dropper::Kept(pair & 0x80000000u, rS[m][e + 1]), gain, -delta.y);
          const uint32_t positive = Dropper::Unmarked(pair);
          words[m][k * 2 + r] =
              ptx::PackTruncated(ptx::LowHalf(positive) * low, ptx::HighHalf(positive) * high);
        }
      }
    }
    if (partial) HideZeros(work, hand, ds, words);
  }
  // PARTIAL tiles: 0·NaN of an invisible score is no gradient; and the softcap's derivative.
  ATTN_HD static void HideZeros(const Work& work, const char* hand, const char* ds,
                                uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      // Opaque, so that this stays a branch of its own.
      const uint4 handed = ptx::LoadShared128(hand + ptx::Keep(m * 512));
      const uint32_t p[4] = {handed.x, handed.y, handed.z, handed.w};
      if (Rule::HasSlope(work.problem)) MultiplySlope(ds + m * 16 * 128, words[m]);
#pragma unroll
      for (int n = 0; n < 4; ++n) words[m][n] &= NonZeroHalves(p[n] & 0x7fff7fffu);
    }
  }
  // All ones where a non-negative float16 is not zero.
  ATTN_HD static uint32_t NonZeroHalves(uint32_t word) {
    return (word & 0xffffu ? 0xffffu : 0u) | (word >> 16 ? 0xffff0000u : 0u);
  }
  ATTN_HD static void MultiplySlope(const char* ds, uint32_t (&words)[4]) {
    const uint4 slope = ptx::LoadShared128(ds);
    const uint32_t slopes[4] = {slope.x, slope.y, slope.z, slope.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t s = slopes[(n >> 1) * 2 + (n & 1)];
      words[n] = ptx::PackRounded(ptx::LowHalf(words[n]) * ptx::LowHalf(s),
                                  ptx::HighHalf(words[n]) * ptx::HighHalf(s));
    }
  }

  // dV += (P∘Z)ᵀ·dO or dK += dSᵀ·Q. Lanes n and n ^ 2 swap rows and n ^ 4 the other column half's
  // queries, which turns accumulators into an A operand; dS is stored on the way.
  ATTN_HD static void AddProduct(Lane lane, const uint32_t (&words)[kKeyTiles][4], bool stores_ds,
                                 char* ds, const void* tiles, int offset, const Places& places,
                                 Sums& sums) {
    const bool second = lane.index & 2;
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
      if (stores_ds) {
        ptx::StoreShared128(ds + m * 16 * 128,
                            make_uint4(a[m][0][0][0], a[m][0][0][1], a[m][0][1][0], a[m][0][1][1]));
      }
    }
#pragma unroll
    for (int other = 0; other < 2; ++other) {
      const int from = offset + (other ? places.other : places.own);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int n = 0; n < kChunks / 4; ++n) {
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

  // ---- dQ.
  ATTN_HD static int DqBlock(const Work& work, Pair pair) {
    return work.tiles.First(pair.visit) / kDqBlockRows;
  }
  ATTN_HD static int32_t* TurnOf(const Work& work, Pair pair) {
    const ProblemDesc& p = work.problem;
    return p.dq_turns + (int64_t{work.batch} * p.q_heads + pair.head) * p.turns_head +
           DqBlock(work, pair);
  }
  // Key tiles that see these queries and stand behind this one.
  ATTN_HD static int TurnsBefore(const Work& work, Pair pair) {
    const int row = work.tiles.First(pair.visit);
    const int end = MinInt(row + kDqBlockRows, work.sequence.q_len);
    const Range keys = VisibleKeys(VisibilityOf(work.sequence), row, end);
    return (keys.end - 1) / kKeys - work.first_key / kKeys;
  }
  ATTN_HD static void PassTurn(const Work& work, int index) {
    const Pair pair = {work.kv_head * work.problem.group + index / work.tiles.count(),
                       index % work.tiles.count()};
    Order::Pass(TurnOf(work, pair), TurnsBefore(work, pair) + 1);
  }

  ATTN_HD static void AddDq(const Work& work, Pair pair, int buffer, const Shared& shared) {
    float rQ[Dq::kSums / 8][8];
#pragma unroll
    for (int n = 0; n < Dq::kSums / 8; ++n) Math::Zero(rQ[n]);
    const Lane lane = work.lane;
    const int chunk = Dq::Chunk(work.warp, lane) + (Dq::kWide ? lane.upper() : 0);
    const int from_ds =
        buffer * kDsBytes +
        ChunkOffset(lane.quad(), lane.row_half() * 4 + (work.warp >> 2) * 2 + lane.upper(), 8);
    const int from_k =
        ChunkOffset(lane.quad(), chunk, kChunks) + (Dq::kWide ? 0 : lane.upper() * 8);
#pragma unroll 4
    for (int n = 0; n < kKeys / 4; ++n) {
      const int twist = Twist((n & 3) * 4) * 16;
      const uint4 a = ptx::LoadShared128(At(shared.ds, (from_ds ^ twist) + n * 4 * 128));
      const char* k = At(shared.k, (from_k ^ twist) + n * 4 * kRowBytes);
      MultiplyDq(a, k, rQ);
    }
    float* to = DqSum(work, pair);
#pragma unroll
    for (int n = 0; n < Dq::kSums; ++n) ptx::ReduceAdd(to + n * 32, rQ[n >> 3][n & 7]);
  }
  // Four keys: 8 queries a lane in two sets, times one or two sets of columns.
  ATTN_HD static void MultiplyDq(uint4 a, const char* k, float (&rQ)[Dq::kSums / 8][8]) {
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

  // A row that sees an infinite or NaN number of K has 0·∞ or NaN in that column of dQ, whatever
  // its P. Slow and rare; NaN is NaN in any order.
  ATTN_HD static void SpoilDq(const Work& work) {
    Pair pair = work.First();
#pragma unroll 1
    for (int n = 0; n < work.pairs(); ++n, pair = work.After(pair)) {
#pragma unroll 1
      for (int sum = 0; sum < Dq::kSums; ++sum) {
        const int row = work.tiles.First(pair.visit) + Dq::Query(sum, work.warp, work.lane);
        const int column = Dq::Column(sum, work.warp, work.lane);
        if (SeesNonFinite(work, pair.head, row, column)) {
          ptx::ReduceAdd(DqSum(work, pair) + sum * 32, ptx::BitsFloat(0x7fffffffu));
        }
      }
    }
  }
  ATTN_HD static bool SeesNonFinite(const Work& work, int head, int row, int column) {
    const ScoreContext at = work.At(head);
    bool sees = false;
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      const uint4 chunk = KeyChunk(work, key, column >> 3);
      const uint32_t word =
          (column & 4) ? (column & 2 ? chunk.w : chunk.z) : (column & 2 ? chunk.y : chunk.x);
      if (NonFiniteHalves(word) & (column & 1 ? 0xffff0000u : 0xffffu)) {
        sees |= Rule::IsVisible(at, row, work.first_key + key);
      }
    }
    return sees;
  }
  // This lane's first sum of a block of dQ.
  ATTN_HD static float* DqSum(const Work& work, Pair pair) {
    const ProblemDesc& p = work.problem;
    return p.dq_sums + (int64_t{work.batch} * p.q_heads + pair.head) * p.dq_head +
           static_cast<int64_t>(DqBlock(work, pair)) * Dq::kFloats + work.warp * Dq::kSums * 32 +
           work.lane.index;
  }

  // ---- dK, dV.
  ATTN_HD static void WriteKeyGradients(const Work& work, const Sums& sums) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const RowTensor t = work.role ? p.d_k : p.d_v;
    const int live_chunks = work.role ? p.qk_chunks : p.v_chunks;
    const GradientWriter writer =
        work.role ? GradientWriter(p, p.scale * (1.0f + kTruncationLoss),
                                   p.d_k_exponent - GradientExponent(p, work.batch, work.kv_head))
                  : GradientWriter(p, p.dropout_scale, p.d_v_exponent - kProbabilityShift);
    const char* first = RowsOf(t, s.batch, work.kv_head, s.kv_begin);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.first_key + work.role_warp() * kWarpKeys + m * 16 +
                        Math::Row(2 * r, work.lane.index);
        char* out = const_cast<char*>(ptx::Offset(first, row, static_cast<int>(t.row_stride * 2)));
#pragma unroll
        for (int x = 0; x < kHeadDim / 16; ++x) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int e = Math::Element(r, 2 * half);
            const int chunk = (x >> 1) * 4 + work.lane.column_half() * 2 + half;
            const int column = chunk * 8 + (x & 1) * 4 + (work.lane.index & 2);
            const uint32_t word = writer.Pack(sums[m][x][e], sums[m][x][e + 1]);
            if (row < s.kv_len && chunk < live_chunks) ptx::StoreGlobal32(out + column * 2, word);
          }
        }
      }
    }
  }
};

}  // namespace attnd::sm70
