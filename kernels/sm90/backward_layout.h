// backward_layout.h: the layout that the roles of the backward kernel share (backward.h): its
// sizes, its shared memory, and the rounds of a block, 64 queries of one query head each.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/dq_sums.h"
#include "kernels/rules/dropout_rules.h"
#include "kernels/rules/list_runs.h"
#include "kernels/sm80/backward_passes.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

// A tile of keys, and the words of dropout's decisions on a round (dropout_bits.h): one for each
// thread of the warpgroups that multiply.
inline constexpr int kBackwardKeys = 128;
inline constexpr int kDropoutWords = kBackwardKeys * kDqBlockRows / 32;

struct KeepAll {
  static constexpr bool kDrops = false;
};
struct ReplayDropout {
  static constexpr bool kDrops = true;
};

// The tiles of queries that a block of keys visits, one query head of its KV head after another.
// What no mask cuts has no lists, so ListedTiles serve all rules.
class QueryVisits {
 public:
  ATTN_HD QueryVisits(const ProblemDesc& problem, const SequenceDesc& sequence,
                      const TileWork& tile, int first_key, int end_key)
      : problem_(problem),
        tile_(tile),
        range_(RowTiles(VisibilityOf(sequence), first_key, end_key, kDqBlockRows)) {}
  ATTN_HD int first_head() const { return tile_.head * problem_.group; }
  ATTN_HD int end_head() const { return first_head() + problem_.group; }
  ATTN_HD ListedTiles Of(int head) const {
    return ListedTiles(range_, problem_.tile_lists, 0, tile_.batch, head, tile_.tile);
  }
  // Whole warps call it.
  ATTN_HD int Count(int lane) const {
    if (problem_.tile_lists.lines == nullptr) return range_.count() * problem_.group;
    uint32_t count = 0;
    for (int head = first_head() + lane; head < end_head(); head += kWarpLanes) {
      count += static_cast<uint32_t>(Of(head).count());
    }
#pragma unroll
    for (int mask = 1; mask < kWarpLanes; mask <<= 1) count += ptx::ShuffleXor(count, mask);
    return static_cast<int>(count);
  }

  ATTN_HD const TileVisits& range() const { return range_; }

 private:
  const ProblemDesc& problem_;
  TileWork tile_;
  TileVisits range_;
};

// One visit after the other.
template <bool kListed>
class VisitCursor;
template <>
class VisitCursor<true> {
 public:
  ATTN_HD explicit VisitCursor(const QueryVisits& of, int first = 0)
      : head_(of.first_head()), n_(first), tiles_(of.Of(head_)) {
    FindHead(of);
  }
  ATTN_HD int head() const { return head_; }
  ATTN_HD uint32_t Load() const { return tiles_.Load(n_); }
  ATTN_HD ListedVisit Visit(const QueryVisits&, uint32_t loaded) const {
    return tiles_.Visit(loaded);
  }
  ATTN_HD uint32_t Bitmap(uint32_t loaded) const { return tiles_.Bitmap(loaded); }
  ATTN_HD void Advance(const QueryVisits& of, int visits = 1) {
    n_ += visits;
    FindHead(of);
  }

 private:
  ATTN_HD void FindHead(const QueryVisits& of) {
    while (n_ >= tiles_.count() && head_ + 1 < of.end_head()) {
      n_ -= tiles_.count();
      tiles_ = of.Of(++head_);
    }
  }
  int head_, n_;
  ListedTiles tiles_;
};
// This one serves where there are no lists.
template <>
class VisitCursor<false> {
 public:
  ATTN_HD explicit VisitCursor(const QueryVisits& of) : head_(of.first_head()), n_(0) {}
  ATTN_HD int head() const { return head_; }
  ATTN_HD uint32_t Load() const { return static_cast<uint32_t>(n_); }
  ATTN_HD ListedVisit Visit(const QueryVisits& of, uint32_t loaded) const {
    const int n = static_cast<int>(loaded);
    return {static_cast<uint32_t>(of.range().First(n)) |
            (of.range().IsCut(n) ? uint32_t{ListedVisit::kCut} : 0u)};
  }
  ATTN_HD uint32_t Bitmap(uint32_t) const { return 0; }
  ATTN_HD void Advance(const QueryVisits& of) {
    if (++n_ < of.range().count()) return;
    n_ = 0;
    ++head_;
  }

 private:
  int head_, n_;
};

// RoundPlaces finds round n's place from the start, for what is slow and rare.
struct RoundPlaces {
  const QueryVisits& visits;
  int count;
  ATTN_HD int rounds() const { return count; }
  ATTN_HD int HeadOf(int n) const { return At(n).head(); }
  ATTN_HD int RowOf(int n) const {
    const VisitCursor<true> at = At(n);
    return at.Visit(visits, at.Load()).First();
  }

 private:
  ATTN_HD VisitCursor<true> At(int n) const {
    VisitCursor<true> at(visits);
    for (; n > 0; --n) at.Advance(visits);
    return at;
  }
};

template <class MathOf, Tile kTile, class RuleOf, class DropoutOf, class DqSumsOf>
struct BackwardLayout {
  using Math = MathOf;
  using Rule = RuleOf;
  using Dropout = DropoutOf;
  using DqSums = DqSumsOf;
  using Dq = sm80::DqLayout<kTile.head_dim>;
  using Adder = DqAdder<Dq, Math, Rule, DqSums>;

  static constexpr int kHeadDim = kTile.head_dim, kPanels = kHeadDim / kPanelColumns;
  static constexpr int kKeys = kTile.kv_rows, kQueries = kTile.q_rows;
  static constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = kGroupThreads * (kConsumers + 1);
  // Named barriers: the consumer groups', one after the other.
  enum BarrierId { kOfGroup = 1 };
  static constexpr int kZeros = 2048;  // that are stored at once
  // Tells whether a tile waits for zeros before it begins, rather than before its second round. The
  // other way the compiler makes code of the groups that multiply which is 4 % slower.
  static constexpr bool kZeroedAhead = kHeadDim <= 64;
  static constexpr int kChunks = kHeadDim / 8;
  // 208 KB of tiles at 128 columns, 192 at 64.
  static constexpr int kStages = kHeadDim > 64 ? 2 : 4;
  static constexpr int kScoreStages = kHeadDim > 64 ? 3 : 4;
  static constexpr int kSumStages = kHeadDim > 64 ? 1 : 2;
  static constexpr int kPlaces = 8;  // more than stages and what lags behind them
  static constexpr int kSlots = 2;   // of tiles of keys
  // Rounds before a tile's end at which the block asks for its next tile: early enough to prepare
  // it, late enough that no other block waits for work meanwhile.
  static constexpr int kLead = 8;
  static_assert(kKeys == kBackwardKeys && kKeys == kConsumers * kGroupRows);
  static_assert(kQueries == kDqBlockRows && kDropoutWords == kConsumers * kGroupThreads);
  static_assert(kPlaces >= kStages + 3);

  // A slot holds what is known of a tile of keys before its rounds.
  struct Slot {
    Descriptors descriptors;
    TileWork tile;
    int number;                    // of the tile in the launch
    int first, rounds;             // rounds before it, in the block's life; its own
    uint32_t non_finite;           // whether rows of Q or dO may be
    uint32_t first_dropout;        // of its rounds in LaunchParams::dropout_bits
    uint32_t bad_keys[2 * kKeys];  // whether halves of K's rows hold infinities or NaN
  };
  // RoundScale says in one word how a round's dS is scaled: the power of two, whether it is another
  // than that of the round before, and whether rows have second integers.
  struct RoundScale {
    int exponent;
    bool changes, has_rests;
    ATTN_HD explicit RoundScale(uint32_t word)
        : exponent(static_cast<int>(word) >> 2),
          changes((word & 2) != 0),
          has_rests((word & 1) != 0) {}
    ATTN_HD RoundScale(int of, bool differs, bool rests)
        : exponent(of), changes(differs), has_rests(rests) {}
    ATTN_HD uint32_t Word() const {
      return static_cast<uint32_t>(exponent * 4) | (changes ? 2u : 0u) | (has_rests ? 1u : 0u);
    }
  };
  struct alignas(1024) Shared {
    char k[kPanels * PanelBytes(kKeys)], v[kPanels * PanelBytes(kKeys)];
    char q[kStages][kPanels * PanelBytes(kQueries)], d_o[kStages][kPanels * PanelBytes(kQueries)];
    char ds[kScoreStages][PanelBytes(kKeys)];     // [key][query]
    float sums[kSumStages][kQueries * kHeadDim];  // of dQ, on their way out; at the end dV, dK
    float stabilizer[kStages][kQueries], delta[kStages][kQueries];
    float dq_factor[kPlaces][kQueries];  // negative where a row has second integers
    uint4 places[kPlaces];               // of rounds: visit, head, bitmap, RoundScale
    alignas(16) float zeros[kZeros];
    alignas(16) uint32_t kept[DropoutOf::kDrops ? kStages : 1][kDropoutWords];
    Slot slots[kSlots];
    uint64_t full_work[kSlots], empty_work[kSlots];
    uint64_t full_k, empty_k, full_v, empty_v;
    uint64_t raw;       // a tile that has to be cleaned
    uint64_t near_end;  // of the loader's rounds: kLead
    uint64_t full_q[kStages], empty_q[kStages], full_d_o[kStages], empty_d_o[kStages];
    uint64_t full_ds[kScoreStages], empty_ds[kScoreStages];
  };

  // A tile of keys. What it is asked for comes from shared memory, since registers are few.
  struct Work {
    Slot& slot;
    const ProblemDesc& problem;
    const SequenceDesc& sequence;
    ATTN_HD TileWork tile() const {
      const uint4 tile = ptx::LoadShared128(&slot.tile);
      return {static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z),
              static_cast<int>(tile.w)};
    }
    ATTN_HD int batch() const { return Load(&slot.tile.batch); }
    ATTN_HD int kv_head() const { return Load(&slot.tile.head); }
    ATTN_HD int first_key() const { return Load(&slot.tile.tile) * kKeys; }
    ATTN_HD int first() const { return Load(&slot.first); }
    ATTN_HD int rounds() const { return Load(&slot.rounds); }
    ATTN_HD bool non_finite() const { return Load(&slot.non_finite) != 0; }
    ATTN_HD int64_t first_dropout() const { return ptx::LoadShared32(&slot.first_dropout); }
    // The round counts from the tile's first.
    ATTN_HD int LeadRound() const { return MaxInt(0, rounds() - kLead); }
    ATTN_HD QueryVisits Visits() const {
      const int key = first_key();
      return QueryVisits(problem, sequence, tile(), key, MinInt(key + kKeys, sequence.kv_len));
    }
    ATTN_HD ScoreContext At(int head) const {
      return {problem, sequence, batch(), head, Rule::OptionsOf(problem)};
    }

   private:
    ATTN_HD static int Load(const void* p) { return static_cast<int>(ptx::LoadShared32(p)); }
  };
  // The block's n-th tile, once it is known; whether there is one.
  ATTN_HD static bool WaitForWork(const LaunchParams& params, int n, Shared& shared) {
    ptx::WaitForPhase(&shared.full_work[n % kSlots], Parity(n, kSlots));
    return static_cast<int>(ptx::LoadShared32(&shared.slots[n % kSlots].number)) <
           params.tile_count;
  }
  ATTN_HD static Work WorkOf(int n, Shared& shared) {
    Slot& slot = shared.slots[n % kSlots];
    return {slot, slot.descriptors.problem, slot.descriptors.sequence};
  }

  // The parity of the phase that a barrier's n-th use ends, of `uses` barriers in turn.
  ATTN_HD static uint32_t Parity(int n, int uses) { return static_cast<uint32_t>(n / uses) & 1; }
};

}  // namespace attnd::sm90
