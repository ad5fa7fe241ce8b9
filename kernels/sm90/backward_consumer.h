// A warpgroup of the backward kernel (backward.h) that multiplies: 64 keys of the block, a round of
// 64 queries at a time. Errors: none.
//
// A round: dPᵀ starts | P from scores that are there | dV starts | dS into P's registers and, for
// the other group, into shared memory | dK, dQ of the round before and the next scores start | dQ
// leaves. dQ's columns are halved between the groups, and it lags a round behind, so that no group
// waits for the other's dS. Nothing is in flight where the loop begins again.
#pragma once

#include "kernels/sm90/backward_bringer.h"
#include "kernels/sm90/dropout_bits.h"

namespace attnd::sm90 {

template <class Layout>
class BackwardConsumer {
 public:
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;

  // Warpgroup `group` calls it, for all of the block's tiles.
  ATTN_HD static void RunAll(const LaunchParams& params, int group, int thread, Shared& shared) {
#pragma unroll 1
    for (int tile = 0; Layout::WaitForWork(params, tile, shared); ++tile) {
      const Work work = Layout::WorkOf(tile, shared);
      BackwardConsumer(work, group, thread, shared).Run(Layout::Parity(tile, 1));
      ptx::SyncWarp();
      if (thread % kWarpLanes == 0) ptx::Arrive(&shared.empty_work[tile % Layout::kSlots]);
    }
  }

 private:
  using Math = typename Layout::Math;
  using Rule = typename Layout::Rule;
  static constexpr bool kDrops = Layout::Dropout::kDrops;
  static constexpr bool kFixedPoint = Layout::DqSums::kFixedPoint;
  static constexpr int kHeadDim = Layout::kHeadDim, kChunks = Layout::kChunks;
  static constexpr int kKeys = Layout::kKeys, kQueries = Layout::kQueries;
  static constexpr int kStages = Layout::kStages, kScoreStages = Layout::kScoreStages;
  static constexpr int kSumStages = Layout::kSumStages;
  static constexpr int kGroups = kQueries / 8;         // of queries
  static constexpr int kSumGroups = kHeadDim / 2 / 8;  // of dQ's columns
  static constexpr int kPairs = 2 * kGroups;
  // Cycles that the second group starts later, so that one's arithmetic meets the other's products.
  static constexpr uint32_t kSkew = kHeadDim > 64 ? 1300 : 700;

  using Scores = float[kGroups][4];    // of Sᵀ: keys along rows, queries along columns
  using Words = uint32_t[kGroups][2];  // P or dS as an operand
  using KeySums = float[kChunks][4];
  using QuerySums = float[kSumGroups][4];
  struct Sums {
    KeySums d_k, d_v;
  };
  // A round's place, known a round ahead.
  struct Place {
    ListedVisit visit;
    uint32_t shown;  // by a masked tile's bitmap
  };

  // `thread` is one of warpgroup `group`.
  ATTN_HD BackwardConsumer(const Work& work, int group, int thread, Shared& shared)
      : work_(work),
        shared_(shared),
        group_(group),
        thread_(thread),
        lane_(thread % kWarpLanes),
        warp_(ptx::Uniform(thread / kWarpLanes)),
        matrix_offset_(PanelOffset<kKeys>(own_key() + (lane_ & 15), lane_ >> 4)),
        always_partial_(IsAtEnd()) {}

  // `parity` is that of the tile's K and V.
  ATTN_HD void Run(uint32_t parity) {
    Sums sums;
    Clear(sums.d_k);
    Clear(sums.d_v);
    ptx::WaitForPhase(&shared_.full_k, parity);
    if (work_.rounds() > 0) {
      Accumulate(parity, sums);
    } else {
      ptx::WaitForPhase(&shared_.full_v, parity);
      Arrive(&shared_.empty_v);
      Arrive(&shared_.empty_k);
    }
    WriteKeyGradients(sums);
    if (thread_ == 0) ptx::WaitForBulk();  // the dQ kernel will be told
    if (work_.rounds() > 0 && IsAnyKeyBad()) MarkNonFiniteKeys();
  }
  ATTN_HD static void Clear(KeySums& sums) {
#pragma unroll
    for (int n = 0; n < kChunks * 4; ++n) sums[n >> 2][n & 3] = 0;
  }
  ATTN_HD void Arrive(uint64_t* barrier) const {
    if (lane_ == 0) ptx::Arrive(barrier);
  }
  ATTN_HD int own_key() const { return group_ * kGroupRows + warp_ * 16; }
  ATTN_HD const char* keys() const { return shared_.k + group_ * PanelBytes(kGroupRows); }
  ATTN_HD const char* values() const { return shared_.v + group_ * PanelBytes(kGroupRows); }
  // The group's columns of K.
  ATTN_HD const char* columns() const {
    return kHeadDim > 64 ? shared_.k + group_ * PanelBytes(kKeys)
                         : shared_.k + group_ * (kRowBytes / 2);
  }

  // ---- The loop.
  ATTN_HD void Accumulate(uint32_t parity, Sums& sums) {
    Scores rS;
    const int first = work_.first(), last = first + work_.rounds() - 1;
    ptx::WaitForPhase(&shared_.full_q[first % kStages], Layout::Parity(first, kStages));
    Place place = PlaceOf(first);
    ptx::FenceProducts();
    MakeRows<Math, kHeadDim, kKeys>(keys(), shared_.q[first % kStages], rS);
    ptx::CommitProducts();
    has_bad_keys_ = FindBadKeys();
    always_partial_ |= has_bad_keys_;
    ptx::WaitForPhase(&shared_.full_v, parity);
    ptx::WaitForProducts<0>(rS);
    if (has_bad_keys_) CleanKeys();
    if (group_ == 1) {
      ptx::Pause(kSkew);
      ptx::Pin(rS);
    }
    if (first == last) {
      Step<true, true, true>(first, place, rS, sums);
    } else {
      Step<true, false, true>(first, place, rS, sums);
#pragma unroll 1
      for (int round = first + 1; round < last; ++round) {
        // The code of FULL tiles lies together.
        if (ptx::Uniform(IsPartial(place))) {
          Step<false, false, true>(round, place, rS, sums);
        } else {
          Step<false, false, false>(round, place, rS, sums);
        }
      }
      Step<false, true, true>(last, place, rS, sums);
    }
    QuerySums rQ;
    ptx::WaitForPhase(&shared_.full_ds[last % kScoreStages], Layout::Parity(last, kScoreStages));
    ptx::FenceProducts();
    MakeAcross<Math, kKeys>(shared_.ds[last % kScoreStages], columns(), rQ);
    ptx::CommitProducts();
    ptx::WaitForProducts<0>(rQ);
    Arrive(&shared_.empty_k);
    Arrive(&shared_.empty_ds[last % kScoreStages]);
    AddSums(last, rQ);
  }

  template <bool kFirst, bool kLast, bool kMayHide>
  ATTN_HD void Step(int round, Place& place, Scores& rS, Sums& sums) {
    const int stage = round % kStages, slot = round % kScoreStages;
    const int before = (round - 1) % kScoreStages;
    Scores rD;  // dP, then dS
    Words rP;
    ptx::WaitForPhase(&shared_.full_d_o[stage], Layout::Parity(round, kStages));
    ptx::FenceProducts();
    MakeRows<Math, kHeadDim, kKeys>(values(), shared_.d_o[stage], rD);
    ptx::CommitProducts();
    const uint32_t kept = Kept(stage);
    uint32_t visible = ~0u;
    const bool partial = kMayHide && IsPartial(place);
    if (partial) visible = ApplyRule(place, rS);
    MakeP(stage, partial, visible, rS);
    Pack(rS, rP);
    Drop(kept, rP);
    ptx::Pin(rS);
    PinWords(rP);
    // This wait also keeps the exponentials before the next one.
    ptx::WaitForPhase(&shared_.empty_ds[slot], Layout::Parity(round, kScoreStages) ^ 1);
    ptx::WaitForProducts<0>(rD);
    ptx::Pin(rS);
    PinWords(rP);
    if constexpr (kLast) Arrive(&shared_.empty_v);
    ptx::FenceProducts();
    AddPairs<Math, kQueries / kDepth>(rP, shared_.d_o[stage], sums.d_v);
    ptx::CommitProducts();
    const RoundScale scale = ScaleOf(round);
    MakeDs(stage, scale.exponent, partial, visible, kept, rS, rD);
    ptx::Pin(rD);
    ptx::WaitForProducts<0>(sums.d_v);
    if constexpr (!kFirst) {
      if (ptx::Uniform(scale.changes))
        FollowGain(scale.exponent - ScaleOf(round - 1).exponent, sums);
    }
    PinWords(rP);
    Arrive(&shared_.empty_d_o[stage]);
    Pack(rD, rP);
    StoreWords(rP, shared_.ds[slot]);
    ptx::FenceShared();
    ptx::SyncWarp();
    Arrive(&shared_.full_ds[slot]);
    PinWords(rP);
    ptx::FenceProducts();
    AddPairs<Math, kQueries / kDepth>(rP, shared_.q[stage], sums.d_k);
    ptx::CommitProducts();
    QuerySums rQ;
    if constexpr (!kFirst) {
      ptx::WaitForPhase(&shared_.full_ds[before], Layout::Parity(round - 1, kScoreStages));
      ptx::FenceProducts();
      MakeAcross<Math, kKeys>(shared_.ds[before], columns(), rQ);
      ptx::CommitProducts();
    }
    if constexpr (!kLast) {
      const int next = (round + 1) % kStages;
      ptx::WaitForPhase(&shared_.full_q[next], Layout::Parity(round + 1, kStages));
      ptx::FenceProducts();
      MakeRows<Math, kHeadDim, kKeys>(keys(), shared_.q[next], rS);
      ptx::CommitProducts();
      place = PlaceOf(round + 1);
    }
    if constexpr (!kFirst) {
      ptx::WaitForProducts<kLast ? 0 : 1>(rQ);
      ptx::Pin(sums.d_k);
      PinWords(rP);
      Arrive(&shared_.empty_q[stage]);
      Arrive(&shared_.empty_ds[before]);
      AddSums(round - 1, rQ);
      if constexpr (!kLast) ptx::WaitForProducts<0>(rS);
    } else {
      ptx::WaitForProducts<0>(sums.d_k);
      if constexpr (!kLast) ptx::Pin(rS);
      PinWords(rP);
      Arrive(&shared_.empty_q[stage]);
    }
  }
  using RoundScale = typename Layout::RoundScale;
  ATTN_HD RoundScale ScaleOf(int round) const {
    return RoundScale(ptx::LoadShared32(&shared_.places[round % Layout::kPlaces].w));
  }
  // Rare.
  ATTN_HD static void FollowGain(int more, Sums& sums) {
    const float factor = PowerOfTwo(MaxInt(more, -126));
#pragma unroll
    for (int n = 0; n < kChunks * 4; ++n) sums.d_k[n >> 2][n & 3] *= factor;
  }
  ATTN_HD static void PinWords(Words& words) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) ptx::Pin(words[n >> 1][n & 1]);
  }

  // ---- What may be hidden.
  ATTN_HD Place PlaceOf(int round) const {
    const uint4 at = ptx::LoadShared128(&shared_.places[round % Layout::kPlaces]);
    Place place = {{at.x}, ~0u};
    if constexpr (Rule::kListed) {
      if (place.visit.IsMasked()) {
        // A word is 32 queries of the warp's 16 keys and 16 others.
        const char* bitmap = ptx::Offset(work_.problem.tile_lists.bitmaps, static_cast<int>(at.z),
                                         BitmapWords(kQueries, kKeys) * 4);
        const char* word = bitmap + (SquareOf(0, own_key(), kKeys) + lane_) * 4;
        place.shown = ptx::Permute(ptx::LoadConstant32(word),
                                   ptx::LoadConstant32(word + SquareOf(32, 0, kKeys) * 4),
                                   warp_ & 1 ? 0x7362u : 0x5140u);
      }
    }
    return place;
  }
  ATTN_HD bool IsPartial(const Place& place) const {
    return place.visit.IsPartial() || always_partial_;
  }
  ATTN_HD bool IsAtEnd() const { return work_.first_key() + kKeys > work_.sequence.kv_len; }
  // Bit 2·(kGroups·r + t) + c: row r of the lane's two keys, the c-th of its queries of group t.
  ATTN_HD uint32_t ApplyRule(const Place& place, Scores& rS) const {
    const ScoreContext context = work_.At(0);  // no option of a head is looked at
    const int lane = ptx::Keep(lane_);
    ScorePlace pairs[kPairs];
    float scores[kPairs][2], slopes[kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int r = n / kGroups, t = n % kGroups;
      pairs[n] = {place.visit.First() + t * 8 + Accumulator::Col(0, lane),
                  work_.first_key() + own_key() + Accumulator::Row(2 * r, lane)};
      scores[n][0] = rS[t][2 * r];
      scores[n][1] = rS[t][2 * r + 1];
    }
    const uint32_t shown = has_bad_keys_ ? place.shown & ~BadKeys() : place.shown;
    uint32_t visible = Rule::template ApplyAll<Along::kRows>(
        context, pairs, place.visit.IsCut() || IsAtEnd(), shown, scores, slopes);
    visible &= shown;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      rS[(n >> 1) % kGroups][2 * ((n >> 1) / kGroups) + (n & 1)] = scores[n >> 1][n & 1];
    }
    return visible;
  }
  ATTN_HD static void Hide(uint32_t visible, Scores& rS) {
#pragma unroll
    for (int n = 0; n < 4 * kGroups; ++n) {
      const int t = n >> 2, e = n & 3;
      if (!(visible >> (2 * (kGroups * (e >> 1) + t) + (e & 1)) & 1)) rS[t][e] = 0;
    }
  }
  // A key with infinities or NaN gives scores of −∞, or its rows have no finite lse: in both cases
  // P of other rows is 0, and so K can be kept finite for dQ's product. Whether the group has such.
  ATTN_HD bool FindBadKeys() const {
    uint32_t met = 0;
#pragma unroll
    for (int n = 0; n < kChunks / 2; ++n) {
      const uint4 bad = NonFiniteHalves<Math>(ptx::LoadShared128(KeyChunk(n)));
      met |= bad.x | bad.y | bad.z | bad.w;
    }
    const int half = thread_ / kGroupRows, key = group_ * kGroupRows + thread_ % kGroupRows;
    ptx::StoreShared32(&work_.slot.bad_keys[half * kKeys + key], met);
    SyncGroup();
    uint32_t bad = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int of = (n & 1) * kKeys + group_ * kGroupRows + (n >> 1) * kWarpLanes + lane_;
      bad |= ptx::LoadShared32(&work_.slot.bad_keys[of]);
    }
    return ptx::VoteAny(bad != 0);
  }
  // This follows the group's first scores.
  ATTN_HD void CleanKeys() const {
    SyncGroup();
#pragma unroll 1
    for (int n = 0; n < kChunks / 2; ++n) {
      BackwardBringer<Layout>::template CleanChunk<Math>(KeyChunk(n));
    }
    ptx::FenceShared();
  }
  // The thread's n-th: it has half of a key's row.
  ATTN_HD char* KeyChunk(int n) const {
    const int half = thread_ / kGroupRows, key = group_ * kGroupRows + thread_ % kGroupRows;
    return shared_.k + PanelOffset<kKeys>(key, half * (kChunks / 2) + n);
  }
  // Returns ones in bits (ApplyRule) of the lane's keys that hold infinities or NaN.
  ATTN_HD uint32_t BadKeys() const {
    uint32_t bad = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int own = own_key() + Accumulator::Row(n & 2, lane_);
      if (ptx::LoadShared32(&work_.slot.bad_keys[(n & 1) * kKeys + own]) != 0) {
        bad |= n & 2 ? 0xffff0000u : 0xffffu;
      }
    }
    return bad;
  }
  // Tells whether any of the block's keys is bad.
  ATTN_HD bool IsAnyKeyBad() const {
    uint32_t bad = 0;
#pragma unroll
    for (int n = 0; n < 2 * kKeys; n += kWarpLanes) {
      bad |= ptx::LoadShared32(&work_.slot.bad_keys[n + lane_]);
    }
    return ptx::VoteAny(bad != 0);
  }

  // ---- Scores to operands.
  ATTN_HD float2 RowPair(const float* rows, int t) const {
    return ptx::LoadSharedFloat2(rows + t * 8 + Accumulator::Col(0, lane_));
  }
  ATTN_HD void MakeP(int stage, bool partial, uint32_t visible, Scores& rS) const {
    const float multiplier = Rule::Multiplier(work_.problem);
#pragma unroll
    for (int t = 0; t < kGroups; ++t) {
      const float2 rows = RowPair(shared_.stabilizer[stage], t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rS[t][e] = ptx::Exp2(ptx::Fma(rS[t][e], multiplier, -(e & 1 ? rows.y : rows.x)));
      }
    }
    // A row whose lse is NaN must not reach the keys that it does not see.
    if (partial) Hide(visible, rS);
  }
  // Dropout's decisions.
  ATTN_HD uint32_t Kept(int stage) const {
    if constexpr (!kDrops) return ~0u;
    return ptx::LoadShared32(&shared_.kept[stage][group_ * kGroupThreads + thread_]);
  }
  ATTN_HD static void Drop(uint32_t kept, Words& words) {
    if constexpr (!kDrops) return;
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
      words[n >> 1][n & 1] &= DropoutBitsKernel::Mask(kept, n >> 1, n & 1);
    }
  }
  ATTN_HD static void Pack(const Scores& rS, Words& words) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
      const int t = n >> 1, e = 2 * (n & 1);
      words[t][n & 1] = Math::Pack(rS[t][e], rS[t][e + 1]);
    }
  }
  ATTN_HD void MakeDs(int stage, int exponent, bool partial, uint32_t visible, uint32_t kept,
                      const Scores& rS, Scores& rD) const {
    const float gain = PowerOfTwo(exponent - kProbabilityShift);
    const float multiplier = kDrops ? gain * work_.problem.dropout_scale : gain;
    // The loop has the order of the word's bits, so that one instruction brings seven into
    // predicates.
#pragma unroll
    for (int n = 0; n < 4 * kGroups; ++n) {
      const int e = n / kGroups, t = DropoutBitsKernel::GroupOf(n % kGroups);
      const float2 rows = RowPair(shared_.delta[stage], t);
      const float delta = e & 1 ? rows.y : rows.x;
      float difference = ptx::Fma(rD[t][e], multiplier, -delta);
      if (kDrops && !DropoutBitsKernel::IsKept(kept, t, e)) difference = -delta;
      rD[t][e] = rS[t][e] * difference;
    }
    if (partial) Hide(visible, rD);
  }
  // Stores the warp's 16 keys as [key][query].
  ATTN_HD void StoreWords(const Words& words, char* to) const {
#pragma unroll
    for (int t = 0; t < kGroups; t += 2) {
      ptx::StoreMatrices(to + (matrix_offset_ ^ t * 16),
                         make_uint4(words[t][0], words[t][1], words[t + 1][0], words[t + 1][1]));
    }
  }

  // ---- dQ, in the order of sm80::DqLayout: element e of the group of columns x of this warp's 16
  // queries is the sum Sum(x, e) of one of its warps.
  using Dq = typename Layout::Dq;
  static constexpr int kWarpGroups = Dq::kWarpColumns / 8;  // of columns, of a warp there
  ATTN_HD int WarpOf(int x) const {
    return warp_ * 16 / Dq::kWarpQueries * Dq::kColumnGroups + group_ * (kSumGroups / kWarpGroups) +
           x / kWarpGroups;
  }
  ATTN_HD int SumOf(int x, int e) const {
    return (warp_ * 16 % Dq::kWarpQueries / 16 * Dq::kColumnTiles + x % kWarpGroups) * 4 + e;
  }
  ATTN_HD void AddSums(int round, QuerySums& rQ) {
    float* const to = shared_.sums[round % kSumStages];
    [[maybe_unused]] bool is_rare = false;
    if constexpr (kFixedPoint) {
      if (ptx::VoteAny(ScaleOf(round).has_rests)) AddRests(round, rQ, to);
      is_rare = RoundInPlace(round, rQ);
    }
    // Those that went out of the same memory before have been read.
    if (thread_ == 0) ptx::WaitForBulkReads<kSumStages - 1>();
    SyncGroup();
    if constexpr (kFixedPoint) {
      if (is_rare) {
        Put(rQ, to, 0);
        RoundRareSums(round, to);
      } else {
        Put(rQ, to, ptx::FloatBits(kRounder));
      }
    } else {
      Put(rQ, to, 0);
    }
    ptx::FenceShared();
    SyncGroup();
    if (thread_ == 0) SendSums(round, to, 0);
  }
  // Adds the rests of rounding of the rows that have second integers. It is rare, so a loop, which
  // is short.
  ATTN_HD void AddRests(int round, const QuerySums& rQ, float* to) const {
    const float* factors = shared_.dq_factor[round % Layout::kPlaces] + warp_ * 16;
    const float unit = PowerOfTwo(FixedPoint::RestBits(work_.sequence.kv_len));
    if (thread_ == 0) ptx::WaitForBulkReads<kSumStages - 1>();
    SyncGroup();
    Put(rQ, to, 0);
#pragma unroll 1
    for (int n = 0; n < 4 * kSumGroups; ++n) {
      const float signed_factor = ptx::LoadSharedFloat(factors + Accumulator::Row(n & 2, lane_));
      const float factor = ptx::Absolute(signed_factor), units = signed_factor < 0 ? unit : 0;
      float* const at = SumAt(to, n >> 2, n & 3);
      const float sum = ptx::LoadSharedFloat(at);
      const float whole = ptx::Round(ptx::Fma(sum, factor, kRounder) - kRounder);
      const float rest = ptx::Fma(sum, factor, -whole) * units;
      ptx::StoreShared32(at, static_cast<uint32_t>(ptx::RoundToInt(rest)));
    }
    ptx::FenceShared();
    SyncGroup();
    if (thread_ != 0) return;
    SendSums(round, to, work_.problem.dq_rest);
    ptx::WaitForBulkReads<0>();
  }
  // 1.5·2^23: float32 numbers near it are integers, so a number below 2^22 in size added to it is
  // rounded, and their bits' difference is the integer. Conversion would take the unit that makes
  // exponentials, which at 64 columns is the busiest.
  static constexpr float kRounder = 12582912.0f;
  // Rounds to units of one, plus kRounder. Returns whether a sum of the warp is beyond 2^22 or not
  // finite: few are, since a row's bound (FixedPoint) is far above its sums.
  ATTN_HD bool RoundInPlace(int round, QuerySums& rQ) const {
    const float* factors = shared_.dq_factor[round % Layout::kPlaces] + warp_ * 16;
    uint32_t differing = 0;  // from kRounder's sign and exponent
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor =
          ptx::Absolute(ptx::LoadSharedFloat(factors + Accumulator::Row(2 * r, lane_)));
#pragma unroll
      for (int n = 0; n < 2 * kSumGroups; ++n) {
        float& sum = rQ[n >> 1][2 * r + (n & 1)];
        sum = ptx::Fma(sum, factor, kRounder);
        differing |= ptx::FloatBits(sum) ^ ptx::FloatBits(kRounder);
      }
    }
    return ptx::VoteAny(differing >> 23 != 0);
  }
  ATTN_HD void SyncGroup() const { ptx::BarrierSync(Layout::kOfGroup + group_, kGroupThreads); }
  // The group's columns are those of two runs of warps there, one for each half of the queries.
  ATTN_HD void SendSums(int round, const float* sums, int64_t rest) const {
    const uint2 place = ptx::LoadShared64(&shared_.places[round % Layout::kPlaces]);
    const ProblemDesc& p = work_.problem;
    float* to = p.dq_sums + rest +
                (int64_t{work_.batch()} * p.q_heads + static_cast<int>(place.y)) * p.dq_head +
                int64_t{ListedVisit{place.x}.First() / kDqBlockRows} * Dq::kBlockFloats;
    constexpr int kRun = Dq::kFloats / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = (2 * half + group_) * kRun;
      if constexpr (kFixedPoint) {
        ptx::AddInBulk(reinterpret_cast<int32_t*>(to + first),
                       reinterpret_cast<const int32_t*>(sums + first), kRun * 4);
      } else {
        ptx::AddInBulk(to + first, sums + first, kRun * 4);
      }
    }
    ptx::CommitBulk();
  }
  // Bits less those of zero.
  ATTN_HD void Put(const QuerySums& rQ, float* to, uint32_t zero) const {
#pragma unroll
    for (int n = 0; n < 4 * kSumGroups; ++n) {
      ptx::StoreShared32(SumAt(to, n >> 2, n & 3), ptx::FloatBits(rQ[n >> 2][n & 3]) - zero);
    }
  }
  ATTN_HD float* SumAt(float* sums, int x, int e) const {
    return sums + (WarpOf(x) * Dq::kSums + SumOf(x, e)) * kWarpLanes + lane_;
  }
  // Rounds the sums that the lane has put there, plus kRounder, to integers: a large one is off by
  // two units at most, float32's last bits. Sums that are not finite are marked.
  ATTN_HD void RoundRareSums(int round, float* sums) const {
    const uint2 place = ptx::LoadShared64(&shared_.places[round % Layout::kPlaces]);
    const int row = ListedVisit{place.x}.First(), head = static_cast<int>(place.y);
#pragma unroll 1
    for (int n = 0; n < 4 * kSumGroups; ++n) {
      const int x = n >> 2, e = n & 3;
      float* at = SumAt(sums, x, e);
      const float sum = ptx::LoadSharedFloat(at) - kRounder;
      AdderOf(WarpOf(x)).MarkIf(!(sum - sum == 0), head, row, SumOf(x, e));
      ptx::StoreShared32(at, static_cast<uint32_t>(ptx::RoundToInt(sum)));
    }
  }
  ATTN_HD typename Layout::Adder AdderOf(int warp) const {
    return {work_.problem, work_.sequence, work_.batch(), warp, lane_};
  }
  ATTN_HD void MarkNonFiniteKeys() const {
    const QueryVisits visits = work_.Visits();
    const RoundPlaces places{visits, work_.rounds()};
    AdderOf(group_ * 4 + warp_)
        .MarkNonFiniteKeys(places, work_.kv_head(), work_.first_key(), kKeys);
  }

  // ---- dK, dV, through room of the group's sums of dQ: a warp's 16 rows.
  ATTN_HD void WriteKeyGradients(const Sums& sums) {
    const ProblemDesc& p = work_.problem;
    if (thread_ == 0) ptx::WaitForBulkReads<0>();
    SyncGroup();
    Write(GradientWriter(p, p.dropout_scale, p.d_v_exponent - kProbabilityShift), sums.d_v, p.d_v,
          p.v_chunks);
    const int rounds = work_.rounds();
    const int exponent = rounds > 0 ? ScaleOf(work_.first() + rounds - 1).exponent : 0;
    Write(GradientWriter(p, p.scale, p.d_k_exponent - exponent), sums.d_k, p.d_k, p.qk_chunks);
  }
  ATTN_HD char* OwnRoom() const {
    constexpr int kRun = Dq::kFloats / 4;  // SendSums
    return reinterpret_cast<char*>(shared_.sums[0] + (2 * (warp_ >> 1) + group_) * kRun +
                                   (warp_ & 1) * (kRun / 2));
  }
  ATTN_HD void Write(const GradientWriter& writer, const KeySums& sums, const RowTensor& t,
                     int live_chunks) const {
    static_assert(Dq::kFloats / 8 * 4 == kStoredRows * kHeadDim * 2);
    const SequenceDesc& s = work_.sequence;
    const int key = work_.first_key() + own_key();
    const RowsOut out = {RowOf(t, s.batch, work_.kv_head(), s.kv_begin + key), 2 * t.row_stride,
                         s.kv_len - key, live_chunks};
    if constexpr (Rule::kListed) {
      if (IsRun(work_.problem)) {
        return StoreFloatRows<kHeadDim>(
            sums, lane_, out, [&](float low, float high) { return writer.Floats(low, high); });
      }
    }
    StoreRows<kHeadDim>(
        sums, [&](float low, float high) { return writer.template PackAs<Math>(low, high); }, lane_,
        OwnRoom(), out);
  }

  const Work& work_;
  Shared& shared_;
  const int group_, thread_, lane_, warp_;
  const int matrix_offset_;    // of the lane's row in the warp's rows of a tile
  bool has_bad_keys_ = false;  // of the group
  bool always_partial_;        // for this or because the last keys may lie beyond the sequence
};

}  // namespace attnd::sm90
