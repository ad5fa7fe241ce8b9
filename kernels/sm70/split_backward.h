// Gradients of float32 attention for one tile of keys, in one pass over the queries that see them:
// what backward.h does, of split numbers (split_float.h), whose operands are twice as large.
//   Sᵀ = scale·K·Qᵀ    P = exp(S − lse)    dPᵀ = V·dOᵀ    dS = P∘(Z∘dP − delta)
//   dV = (P∘Z)ᵀ·dO     dK = scale·dSᵀ·Q    dQ = scale·dS·K      delta = rowsum(dO∘O) − dlse
// Roles: warps 0-3 make Sᵀ, P and dV, warps 4-7 dPᵀ, dS and dK of the same keys. A step is 32
// queries. A warp makes scores of 16 keys and its share of the queries, hands P over or waits for
// it, leaves P or dS in shared memory [key][query], and multiplies that by its share of the columns
// of dO or Q; then all warps turn dS into dQ, each a tile of 16 queries. All operands come from
// shared memory; rows of the next step wait in registers.
// dQ is summed in integers (FixedPointSums, rules/backward_passes.h), of which any order gives the
// same bits. The tensor core adds up scores, or the products of a step; what many steps add to is
// added outside.
// Rows   as backward.h says of those without visible keys and those that are not finite.
// Errors: none. Source: Dao 2023 (FlashAttention-2), Algorithm 2.
#pragma once

#include "kernels/ptx/mma_sm70.h"
#include "kernels/rules/descriptors.h"
#include "kernels/rules/dq_sums.h"
#include "kernels/rules/row_visits.h"
#include "kernels/sm70/backward_dropout.h"
#include "kernels/sm70/backward_staging.h"
#include "kernels/sm70/split_passes.h"

namespace attnd::sm70 {

template <Tile kTile, class Rule, class DropoutPolicy>
struct SplitBackwardKernel {
  using Math = SplitAccumulate;
  static constexpr int kRoleWarps = 4, kThreads = 64 * kRoleWarps;
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.kv_rows, kStepRows = kTile.q_rows;
  static constexpr int kChunks = kHeadDim / 4, kRowChunks = kChunks;  // from row to row
  static constexpr int kRowBytes = kChunks * 16, kTileBytes = kStepRows * kRowBytes;
  static constexpr int kPairBytes = 2 * kTileBytes;       // Q and dO
  static constexpr int kKeyTiles = kKeys / 16;            // of 16 keys
  static constexpr int kShares = kRoleWarps / kKeyTiles;  // warps of the same keys
  static constexpr int kQueryTiles = kStepRows / 16 / kShares;
  static constexpr int kColumnTiles = kHeadDim / 16 / kShares;  // of 16 columns of dV or dK
  static constexpr int kRoundSteps = kDqBlockRows / kStepRows;
  static constexpr int kPairChunks = kStepRows / 4;  // of a row of P or dS
  // A second slot saves a barrier a step where there is room.
  static constexpr int kSlots = kHeadDim == 64 && !Rule::kEveryTile ? 2 : 1;
  static constexpr int kHandBarrier = 1;  // to 4: a pair of warps' P is there
  static constexpr bool kKeepsPitches = false;
  static constexpr int kVectors = 3, kVectorPasses = 1;
  static constexpr int kFactorSteps = 2;  // one is in use while the next is brought
  static constexpr int kShiftOfP = kProbabilityShift + SplitP::kShift;
  static_assert(kStepRows == 32 && kRoundSteps == 2 && kQueryTiles > 0);

  using Visits = RowVisits<Rule>;
  using Cursor = typename Visits::Cursor;
  using FetchPlace = PlaceOfStep<Visits, kStepRows, Rule::kListed>;
  using Dq = SplitDqLayout<kHeadDim>;
  using Adder = DqAdder<Dq, SplitFloat32, Rule, FixedPointSums>;

  ATTN_HD static constexpr int RowOfThread(int thread) { return thread / kRowChunks; }
  ATTN_HD static constexpr int Second(int place, int rows) { return place + rows * kRowBytes; }

  ATTN_HD static float GradientMultiplier(const ProblemDesc& p) {
    return PowerOfTwo(-kShiftOfP) * DropoutPolicy::Factor(p);
  }
  using Slot = StepSlot<kPairBytes, kStepRows>;
  static constexpr int kSlotBytes = sizeof(Slot);
  static constexpr int kHandBytes = kQueryTiles * 1024;  // accumulators of one warp and step
  struct alignas(128) Shared {
    uint4 k[kKeys * kChunks], v[kKeys * kChunks];
    Slot slots[kSlots];
    uint4 p[kKeys * kPairChunks], ds[kKeys * kPairChunks];
    uint4 hand[kRoleWarps][kHandBytes / 16];  // P, of dropped scores negative
    uint4 slopes[Rule::kEveryTile ? kRoleWarps : 1][Rule::kEveryTile ? kHandBytes / 16 : 1];
    Descriptors descriptors;
    float factors[kFactorSteps][kStepRows];  // of dQ's rows
    int left_out;                            // whether K holds an infinity or NaN
    int gains[kKeptGains];
    typename Visits::Ring visits;
  };
  static_assert(sizeof(Shared) <= 96 * 1024, "Volta has 96 KiB an SM");

  struct Work {
    const ProblemDesc& problem;
    const SequenceDesc& sequence;
    int batch, kv_head, first_key;
    Visits visits;
    HeadGains gains;
    float multiplier;  // of the raw products of this role
    bool non_finite;   // whether rows of Q or dO may be
    int thread;
    int role;  // 0: P and dV, 1: dS and dK; by a vote, so that the compiler
               // knows warps do not part
    Lane lane;
    ATTN_HD int warp() const { return thread >> 5; }
    ATTN_HD int role_warp() const { return warp() & (kRoleWarps - 1); }
    ATTN_HD int key() const { return role_warp() / kShares * 16; }  // of the block
    ATTN_HD int share() const { return role_warp() % kShares; }
    ATTN_HD int query() const { return share() * kQueryTiles * 16; }  // of the step
    ATTN_HD ScoreContext At(int head) const {
      return {problem, sequence, batch, head, Rule::OptionsOf(problem)};
    }
    ATTN_HD Adder DqSumsOf(int of_warp) const {
      return {problem, sequence, batch, of_warp, lane.index};
    }
  };

  ATTN_HD static void PutFactor(Shared& shared, int step, int row, float factor) {
    ptx::StoreSharedFloat(&shared.factors[step % kFactorSteps][row], factor);
  }
  ATTN_HD static char* At(void* base, int offset) { return static_cast<char*>(base) + offset; }
  ATTN_HD static const char* At(const void* base, int offset) {
    return static_cast<const char*>(base) + offset;
  }

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
    const int role = ptx::VoteAny(at.thread >= kThreads / 2);
    Work work = {
        problem,
        sequence,
        tile.batch,
        tile.head,
        first_key,
        Visits(problem, sequence, tile, first_key, end_key, shared.visits),
        gains,
        role ? GradientMultiplier(problem) * PowerOfTwo(gains.lowest) : Rule::Multiplier(problem),
        ptx::LoadConstant32(bounds + kNonFiniteRows) != 0,
        at.thread,
        role,
        {at.thread & 31}};
    work.visits.Open(at.thread);
    Accumulate(work, shared);
  }

 private:
  using Scores = float[kQueryTiles][8];  // keys along rows, queries along columns
  using Sums = float[kColumnTiles][8];   // dV or dK
  static constexpr int kScores = kQueryTiles * 8;

  // ---- The block's keys. Rows beyond the sequence are zeros.
  ATTN_HD static void BringKeys(const Work& work, Shared& shared) {
    const ProblemDesc& p = work.problem;
    if (BringRows(work, p.k, p.qk_chunks, shared.k)) ptx::StoreShared32(&shared.left_out, 1);
    BringRows(work, p.v, p.v_chunks, shared.v);
  }
  // Returns whether this thread met an infinity or NaN.
  ATTN_HD static bool BringRows(const Work& work, const RowTensor& t, int live_chunks, void* to) {
    const SequenceDesc& s = work.sequence;
    const char* first = RowOf(t, s.batch, work.kv_head, int64_t{s.kv_begin} + work.first_key);
    const int chunk = work.thread % kChunks, rows = s.kv_len - work.first_key;
    uint32_t met = 0;
#pragma unroll 4
    for (int row = work.thread / kChunks; row < kKeys; row += kThreads / kChunks) {
      uint4 words = make_uint4(0, 0, 0, 0);
      ptx::LoadConstant128If(
          words, ptx::Offset(first + chunk * 16, row, static_cast<int>(t.row_stride * 2)),
          row < rows && chunk < live_chunks);
      const uint4 bad = attnd::NonFiniteHalves<SplitFloat32>(words);
      met |= bad.x | bad.y | bad.z | bad.w;
      ptx::StoreShared128(At(to, ChunkOffset(row, chunk, kChunks)), words);
    }
    return met != 0;
  }

  // ---- The loop.
  ATTN_HD static void Accumulate(Work& work, Shared& shared) {
    StepStager<SplitBackwardKernel> stager(work);
    stager.Bring(work);
    stager.FetchFirst(work, 0, shared);
    BringKeys(work, shared);
    stager.Put(work, 0, 0, shared);
    Sums sums = {};
    Cursor here(work.visits);
    int slot = 0;
    const int rounds = work.visits.rounds();
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll 1
      for (int n = 0; n < kRoundSteps; ++n) {
        ptx::SyncThreads();  // this step's rows are there, and all are done with the last one's
        if (n == 0) work.visits.Advance(round, work.thread);
        const int step = round * kRoundSteps + n;
        if (work.gains.differ) TakeGains(work, step, stager, shared, sums);  // rare
        stager.Bring(work);
        stager.Fetch(work);
        const auto at = here.template Read<kStepRows>(work.visits);
        const int head = here.template Head<kStepRows>(work.visits);
        MakePairs(work, at, here, head, slot, shared);
        ptx::SyncThreads();  // P and dS are there
        const int next = kSlots == 1 ? 0 : kSlotBytes - slot;
        if (kSlots > 1) stager.Put(work, next, step + 1, shared);
        if (IsPartial(work, at.visit) && work.non_finite) LeaveOutRows(work, slot, shared);
        const char* tiles = At(shared.slots, slot);
        AddProduct(work, work.role ? shared.ds : shared.p, tiles + (work.role ? 0 : kTileBytes),
                   sums);
        AddQueryGradient(work, head, at.row, step, shared);
        here.template Advance<kStepRows>(work.visits, at);
        slot = next;
        if (kSlots == 1) {
          ptx::SyncThreads();
          stager.Put(work, 0, step + 1, shared);
        }
      }
    }
    WriteKeyGradients(work, sums);
    ptx::SyncThreads();  // left_out is there, even without a round
    if (ptx::LoadShared32(&shared.left_out)) {
      work.DqSumsOf(work.warp())
          .MarkNonFiniteKeys(work.visits, work.kv_head, work.first_key, kKeys);
    }
  }
  // Ahead of a step, where gains differ.
  ATTN_HD static void TakeGains(Work& work, int step, StepStager<SplitBackwardKernel>& stager,
                                Shared& shared, Sums& sums) {
    if (work.role == 1) {
      const float factor = TakeGain<SplitBackwardKernel>(work, step, shared);
#pragma unroll
      for (int x = 0; x < kColumnTiles * 8; ++x) sums[x >> 3][x & 7] *= factor;
    }
    stager.TakeGain(work, step + 1, shared);
  }
  // A block's last keys may lie beyond the sequence.
  template <class Visit>
  ATTN_HD static bool IsCut(const Work& work, const Visit& visit) {
    return visit.IsCut() || work.first_key + kKeys > work.sequence.kv_len;
  }
  template <class Visit>
  ATTN_HD static bool IsPartial(const Work& work, const Visit& visit) {
    return visit.IsPartial() || IsCut(work, visit);
  }

  // P and dS of a step, in shared memory.
  template <class StepAt>
  ATTN_HD static void MakePairs(const Work& work, const StepAt& at, const Cursor& cursor, int head,
                                int slot, Shared& shared) {
    const bool is_cut = IsCut(work, at.visit), partial = IsPartial(work, at.visit);
    const char* tiles = At(shared.slots, slot);
    const uint32_t shown = Shown(work, at, cursor);
    Scores rS;
    Product(work, work.role ? shared.v : shared.k, tiles + (work.role ? kTileBytes : 0), rS);
    char* hand = At(shared.hand[work.role_warp()], work.lane.index * 16);
    char* slopes = At(shared.slopes[Rule::kEveryTile ? work.role_warp() : 0], work.lane.index * 16);
    const int barrier = kHandBarrier + work.role_warp();
    if (work.role == 0) {
      uint32_t visible = ~0u;
      if (Rule::kEveryTile || partial) {
        visible = ApplyRule(work, head, at.row + work.query(), is_cut, shown, slopes, rS);
      }
      MakeP(work, slot, shared, rS);
      // A row whose lse is NaN must not reach the keys that it does not see.
      if (partial) Hide(visible, rS);
      HandP(work, head, at.row + work.query(), hand, rS);
      ptx::BarrierArrive(barrier, 2 * kWarpLanes);
      StorePairs(work, rS, shared.p);
    } else {
      ptx::BarrierSync(barrier, 2 * kWarpLanes);
      MakeDs(work, partial, slot, hand, slopes, shared, rS);
      StorePairs(work, rS, shared.ds);
    }
  }

  // The warp's rows of `keys` by its rows of `queries`.
  ATTN_HD static void Product(const Work& work, const void* keys, const void* queries, Scores& rS) {
    constexpr int kLinks = 8;  // of a chain of high products
    const int a_offset = ChunkOffset(work.key() + work.lane.OperandRow(), 0, kChunks);
    const int b_offset = ChunkOffset(work.query() + work.lane.OperandKey(), 0, kChunks);
    float low[kQueryTiles][8] = {}, high[kQueryTiles][8] = {};
    Clear(rS);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int place = (c >> 3) * 128, twist = (c & 7) * 16;
      const uint4 a = ptx::LoadShared128(At(keys, (a_offset ^ twist) + place));
      uint4 b[kQueryTiles];
#pragma unroll
      for (int q = 0; q < kQueryTiles; ++q) {
        b[q] = ptx::LoadShared128(At(queries, (b_offset ^ twist) + place + q * 16 * kRowBytes));
      }
#pragma unroll
      for (int q = 0; q < kQueryTiles; ++q) ptx::MmaRowCol(low[q], a.z, a.w, b[q].x, b[q].y);
#pragma unroll
      for (int q = 0; q < kQueryTiles; ++q) ptx::MmaRowCol(high[q], a.x, a.y, b[q].x, b[q].y);
#pragma unroll
      for (int q = 0; q < kQueryTiles; ++q) ptx::MmaRowCol(low[q], a.x, a.y, b[q].z, b[q].w);
      if (c % kLinks == kLinks - 1) Fold(high, rS);
    }
    Fold(low, rS);
    Repair(work, keys, queries, rS);
  }
  template <int kCount>
  ATTN_HD static void Clear(float (&sums)[kCount][8]) {
#pragma unroll
    for (int n = 0; n < kCount * 8; ++n) sums[n >> 3][n & 7] = 0;
  }
  // Takes sums to others and begins them anew.
  template <int kCount>
  ATTN_HD static void Fold(float (&from)[kCount][8], float (&to)[kCount][8]) {
#pragma unroll
    for (int n = 0; n < kCount * 8; ++n) to[n >> 3][n & 7] += from[n >> 3][n & 7];
    Clear(from);
  }
  // Split infinities and NaN are in none of their right places: such scores are made again. [warp]
  ATTN_HD static void Repair(const Work& work, const void* keys, const void* queries, Scores& rS) {
    float all[2] = {};
#pragma unroll
    for (int n = 0; n < kScores; ++n) all[n & 1] = ptx::Fma(rS[n >> 3][n & 7], 0.0f, all[n & 1]);
    if (!ptx::VoteAny(!(all[0] + all[1] == 0))) return;
#pragma unroll 1
    for (int at = 0; at < kScores; ++at) {
      const int key = work.key() + Math::Row(at & 7, work.lane.index);
      const int query = work.query() + (at >> 3) * 16 + Math::Col(at & 7, work.lane.index);
      float sum = 0;
#pragma unroll 1
      for (int c = 0; c < kChunks; ++c) {
        sum = SplitDot(ptx::LoadShared128(At(keys, ChunkOffset(key, c, kChunks))),
                       ptx::LoadShared128(At(queries, ChunkOffset(query, c, kChunks))), sum);
      }
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        float& score = rS[n >> 3][n & 7];
        if (n == at && !(score - score == 0)) score = sum;
      }
    }
  }

  // Returns the mask's bits: bit 8q + e of query tile q.
  template <class StepAt>
  ATTN_HD static uint32_t Shown(const Work& work, const StepAt& at, const Cursor& cursor) {
    if constexpr (Rule::kListed) {
      if (ptx::VoteAny(at.visit.IsMasked() && work.role == 0)) {
        constexpr uint32_t kWords = BitmapWords(kDqBlockRows, kKeys);
        const int square = SquareOf(at.row % kDqBlockRows, work.key(), kKeys);
        const uint32_t bitmap = cursor.template Bitmap<kStepRows>(work.visits);
        const uint32_t word = ptx::LoadConstant32(
            work.problem.tile_lists.bitmaps + uint64_t{bitmap} * kWords + square + work.lane.index);
        // A byte is one tile of 16×16: queries in bit 4 of the place, keys in bit 3.
        const uint32_t own = word >> ((work.key() & 16) / 2 + (work.query() & 16));
        return (own & 0xffu) | (own >> 8 & 0xff00u);
      }
    }
    return ~0u;
  }
  // Bit 8q + e of the result tells whether element e of query tile q is visible.
  ATTN_HD static uint32_t ApplyRule(const Work& work, int head, int first_row, bool is_cut,
                                    uint32_t shown, char* slopes, Scores& rS) {
    constexpr int kPairs = kScores / 2;
    const int lane = ptx::Keep(work.lane.index);
    ScorePlace pairs[kPairs];
    float scores[kPairs][2], slope[kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int e = 2 * (n & 3);
      pairs[n] = {first_row + (n >> 2) * 16 + Math::Col(e, lane),
                  work.first_key + work.key() + Math::Row(e, lane)};
      scores[n][0] = rS[n >> 2][e];
      scores[n][1] = rS[n >> 2][e + 1];
    }
    const uint32_t visible =
        Rule::template ApplyAll<Along::kRows>(work.At(head), pairs, is_cut, shown, scores, slope);
#pragma unroll
    for (int n = 0; n < kScores; ++n) rS[n >> 3][n & 7] = scores[n >> 1][n & 1];
    if constexpr (Rule::kEveryTile) {
      if (Rule::HasSlope(work.problem)) {
#pragma unroll
        for (int n = 0; n < kScores; n += 4) {
          StoreFloats(slopes + n * 128, slope[n / 2][0], slope[n / 2][1], slope[n / 2 + 1][0],
                      slope[n / 2 + 1][1]);
        }
      }
    }
    return visible;
  }
  ATTN_HD static void StoreFloats(char* to, float a, float b, float c, float d) {
    ptx::StoreShared128(
        to, make_uint4(ptx::FloatBits(a), ptx::FloatBits(b), ptx::FloatBits(c), ptx::FloatBits(d)));
  }
  // Loads a vector's numbers of the queries of tile q: those of the lane's first columns, and eight
  // on.
  ATTN_HD static void LoadRows(const Work& work, const Shared& shared, int slot, int vector, int q,
                               float2 (&rows)[2]) {
    const int query = work.query() + q * 16 + Math::Col(0, work.lane.index);
    const char* from = At(shared.slots, slot + kPairBytes + (vector * kStepRows + query) * 4);
    rows[0] = ptx::LoadSharedFloat2(from);
    rows[1] = ptx::LoadSharedFloat2(from + 8 * 4);
  }
  ATTN_HD static void MakeP(const Work& work, int slot, const Shared& shared, Scores& rS) {
#pragma unroll
    for (int q = 0; q < kQueryTiles; ++q) {
      float2 rows[2];
      LoadRows(work, shared, slot, 0, q, rows);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float row = e & 1 ? rows[e >> 2].y : rows[e >> 2].x;
        rS[q][e] = ptx::Exp2(ptx::Fma(rS[q][e], work.multiplier, -row));
      }
    }
  }
  ATTN_HD static void Hide(uint32_t visible, Scores& rS) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if (!(visible >> n & 1)) rS[n >> 3][n & 7] = 0;
    }
  }
  // P for the other role; what remains is what dropout keeps.
  ATTN_HD static void HandP(const Work& work, int head, int first_row, char* hand, Scores& rS) {
#pragma unroll
    for (int q = 0; q < kQueryTiles; ++q) {
      const DropoutPolicy dropout(work.At(head), first_row + q * 16, work.first_key + work.key(),
                                  work.lane.index);
      float marked[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const uint32_t pair = dropout.KeepPair(0, e >> 2, e >> 1 & 1);
        const bool keeps = pair & (e & 1 ? 0x10000u : 1u);
        marked[e] = keeps ? rS[q][e] : -rS[q][e];
        if (!keeps) rS[q][e] = 0;
      }
      StoreFloats(hand + q * 1024, marked[0], marked[1], marked[2], marked[3]);
      StoreFloats(hand + q * 1024 + 512, marked[4], marked[5], marked[6], marked[7]);
    }
  }
  // dS of raw products.
  ATTN_HD static void MakeDs(const Work& work, bool partial, int slot, const char* hand,
                             const char* slopes, const Shared& shared, Scores& rS) {
#pragma unroll
    for (int q = 0; q < kQueryTiles; ++q) {
      float2 rows[2];
      LoadRows(work, shared, slot, 1, q, rows);
      uint32_t p[8];
      LoadWords(hand + q * 1024, p);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float delta = e & 1 ? rows[e >> 2].y : rows[e >> 2].x;
        const float kept = ptx::Fma(rS[q][e], work.multiplier, -delta);
        const float difference = DropoutPolicy::Kept(p[e] >> 31, kept, -delta);
        const uint32_t positive = p[e] & 0x7fffffffu;
        rS[q][e] = ptx::BitsFloat(positive) * difference;
        // 0·NaN of an invisible score is no gradient.
        if (partial && positive == 0) rS[q][e] = 0;
      }
      if constexpr (Rule::kEveryTile) {
        if (Rule::HasSlope(work.problem)) {
          uint32_t slope[8];
          LoadWords(slopes + q * 1024, slope);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (!partial || (p[e] & 0x7fffffffu) != 0) rS[q][e] *= ptx::BitsFloat(slope[e]);
          }
        }
      }
    }
  }
  ATTN_HD static void LoadWords(const char* from, uint32_t (&words)[8]) {
    const uint4 first = ptx::LoadShared128(from), second = ptx::LoadShared128(from + 512);
    words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
    words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
  }

  // P and dS stand by chunks of four queries as K's and Q's rows do: even ones of a step, then odd
  // ones, since the lanes that store together have either.
  ATTN_HD static constexpr int PairPlace(int chunk) { return (chunk & 1) * 4 + (chunk >> 1); }
  // Lanes n and n ^ 2 have halves of chunks of two rows: they swap.
  ATTN_HD static void StorePairs(const Work& work, const Scores& rS, void* to) {
    const bool second = work.lane.index & 2;
    const int row = work.key() + work.lane.OperandRow();
#pragma unroll
    for (int q = 0; q < kQueryTiles; ++q) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int e = 4 * k;
        const SplitPair rows[2] = {SplitNumbers(rS[q][e], rS[q][e + 1]),
                                   SplitNumbers(rS[q][e + 2], rS[q][e + 3])};
        const SplitPair keep = second ? rows[1] : rows[0], give = second ? rows[0] : rows[1];
        const uint32_t high = ptx::ShuffleXor(give.high, 2), low = ptx::ShuffleXor(give.low, 2);
        const int chunk = work.query() / 4 + q * 4 + k * 2 + work.lane.column_half();
        ptx::StoreShared128(At(to, ChunkOffset(row, PairPlace(chunk), kPairChunks)),
                            second ? make_uint4(high, keep.high, low, keep.low)
                                   : make_uint4(keep.high, high, keep.low, low));
      }
    }
  }

  // Infinities and NaN of what P and dS multiply (rules/non_finite_rows.h).
  ATTN_HD static void LeaveOutRows(const Work& work, int slot, Shared& shared) {
    LeaveOut(work, kPairBytes, At(shared.slots, slot));
    ptx::SyncThreads();
  }
  ATTN_HD static void LeaveOut(const Work& work, int bytes, char* tile) {
#pragma unroll 1
    for (int n = work.thread * 16; n < bytes; n += kThreads * 16) {
      ptx::StoreShared128(tile + n, attnd::FiniteHalves<Float16>(ptx::LoadShared128(tile + n)));
    }
  }

  // Operand b from rows: the lane's chunk of row `quad` of four, of columns that stand in turn over
  // two column tiles. Those of tile x, four rows on a step.
  ATTN_HD static int RowsOffset(const Work& work) {
    return ChunkOffset(work.lane.quad(), work.lane.column_half() * 4 + work.lane.upper(), kChunks);
  }
  ATTN_HD static int RowsAt(int offset, int step, int x) {
    return (offset ^ (Twist(4 * step) ^ (x & 1) * 2) * 16) + (x >> 1) * 128 + 4 * step * kRowBytes;
  }
  ATTN_HD static int ColumnChunk(const Work& work, int x, int e) {
    return work.lane.column_half() * 4 + (e >> 2) + (x & 1) * 2 + (x >> 1) * 8;
  }

  // dV += (P∘Z)ᵀ·dO or dK += dSᵀ·Q.
  ATTN_HD static void AddProduct(const Work& work, const void* pairs, const void* rows,
                                 Sums& sums) {
    const int a_offset = ChunkOffset(work.key() + work.lane.OperandRow(), 0, kPairChunks);
    const int b_offset = RowsOffset(work) + work.share() * kColumnTiles * 64;
    Sums step = {};
#pragma unroll
    for (int c = 0; c < kPairChunks; ++c) {
      const uint4 a = ptx::LoadShared128(At(pairs, a_offset ^ PairPlace(c) * 16));
      uint4 b[kColumnTiles];
#pragma unroll
      for (int x = 0; x < kColumnTiles; ++x) {
        b[x] = ptx::LoadShared128(At(rows, RowsAt(b_offset, c, x)));
      }
#pragma unroll
      for (int x = 0; x < kColumnTiles; ++x) ptx::MmaRowRow(step[x], a.z, a.w, b[x].x, b[x].y);
#pragma unroll
      for (int x = 0; x < kColumnTiles; ++x) ptx::MmaRowRow(step[x], a.x, a.y, b[x].z, b[x].w);
#pragma unroll
      for (int x = 0; x < kColumnTiles; ++x) ptx::MmaRowRow(step[x], a.x, a.y, b[x].x, b[x].y);
    }
    Fold(step, sums);
  }

  // ---- dQ: a warp has 16 of a step's queries and a quarter of the columns.
  ATTN_HD static void AddQueryGradient(const Work& work, int head, int row, int step,
                                       Shared& shared) {
    const bool left_out = ptx::LoadShared32(&shared.left_out) != 0;
    if (left_out) {  // K as it is was for scores
      ptx::SyncThreads();
      LeaveOut(work, kKeys * kRowBytes, At(shared.k, 0));
      ptx::SyncThreads();
    }
    constexpr int kTiles = kHeadDim / 64;  // of 16 columns
    const int query_tile = work.warp() >> 2, quarter = work.warp() & 3;
    const int a_chunk = work.lane.upper() * 4 + query_tile * 2 + work.lane.row_half();
    const int a_offset = ChunkOffset(work.lane.quad(), a_chunk, kPairChunks);
    const int b_offset =
        kTiles == 1 ? RowsAt(RowsOffset(work), 0, quarter) : RowsOffset(work) + quarter * 128;
    float rQ[kTiles][8] = {};
#pragma unroll
    for (int y = 0; y < kKeys / 4; ++y) {
      const uint4 a = ptx::LoadShared128(
          At(shared.ds, (a_offset ^ Twist(4 * y) * 16) + 4 * y * kPairChunks * 16));
      uint4 b[kTiles];
#pragma unroll
      for (int x = 0; x < kTiles; ++x) {
        b[x] = ptx::LoadShared128(At(shared.k, RowsAt(b_offset, y, x)));
      }
#pragma unroll
      for (int x = 0; x < kTiles; ++x) ptx::MmaColRow(rQ[x], a.z, a.w, b[x].x, b[x].y);
#pragma unroll
      for (int x = 0; x < kTiles; ++x) ptx::MmaColRow(rQ[x], a.x, a.y, b[x].z, b[x].w);
#pragma unroll
      for (int x = 0; x < kTiles; ++x) ptx::MmaColRow(rQ[x], a.x, a.y, b[x].x, b[x].y);
    }
    AddSums(work, head, row, shared.factors[step % kFactorSteps], rQ);
    if (left_out) {
      ptx::SyncThreads();
      BringKeys(work, shared);
    }
  }
  template <int kTiles>
  ATTN_HD static void AddSums(const Work& work, int head, int row, const float* factors,
                              float (&rQ)[kTiles][8]) {
    const int step_warp = (row & kStepRows) / 8 + (work.warp() >> 2) * 2 + (work.warp() & 1);
    const int query = Dq::Query(0, step_warp, work.lane.index) % kStepRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = ptx::LoadSharedFloat(factors + query + 2 * r);
#pragma unroll
      for (int n = 0; n < kTiles * 8; ++n) {
        if ((n >> 1 & 1) == r) rQ[n >> 3][n & 7] *= factor;
      }
    }
    const float watch = ptx::BitsFloat(work.problem.dq_rest != 0 ? 0x7fffffffu : 0);
    work.DqSumsOf(step_warp).Add(head, row & -kDqBlockRows, (work.warp() & 3) >> 1, watch,
                                 [&](int n) { return rQ[n >> 3][n & 7]; });
  }

  // ---- dK, dV.
  ATTN_HD static void WriteKeyGradients(const Work& work, const Sums& sums) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const RowTensor t = work.role ? p.d_k : p.d_v;
    const int live_chunks = work.role ? p.qk_chunks : p.v_chunks;
    const GradientWriter writer =
        work.role
            ? GradientWriter(p, p.scale, p.d_k_exponent - GainOfSums<SplitBackwardKernel>(work))
            : GradientWriter(p, p.dropout_scale, p.d_v_exponent - kShiftOfP);
    const char* first = RowOf(t, s.batch, work.kv_head, s.kv_begin);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.first_key + work.key() + Math::Row(2 * r, work.lane.index);
      char* out = const_cast<char*>(ptx::Offset(first, row, static_cast<int>(t.row_stride * 2)));
#pragma unroll
      for (int n = 0; n < 2 * kColumnTiles; ++n) {
        const int x = n >> 1, e = 4 * (n & 1) + 2 * r;
        const int chunk = work.share() * kColumnTiles * 4 + ColumnChunk(work, x, e);
        const uint2 numbers = writer.Floats(sums[x][e], sums[x][e + 1]);
        if (row < s.kv_len && chunk < live_chunks) {
          ptx::StoreGlobal64(out + chunk * 16 + (work.lane.index & 2) * 4, numbers);
        }
      }
    }
  }
};

}  // namespace attnd::sm70
