// The rounds of a backward block: kRows queries at a time (64), tile by tile and query head by
// query head of its KV head. A Cursor walks through them in steps, a RoundCursor round by round.
//   Rule::kListed = false   each head's tiles are the same interval
//   Rule::kListed = true    each head's own listed tiles: one thread brings the lists and keeps the
//                           next rounds in a ring in shared memory
#pragma once

#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

// RangeStep says where a step's queries are.
struct RangeStep {
  int row;
  RangeVisit visit;
};
struct ListedStep {
  int row;
  ListedVisit visit;
};

// PlaceOfStep is a cursor's place: looked up when it is asked for, or (kAhead) under way since
// Bring.
template <class Visits, int kStepRows, bool kAhead>
struct PlaceOfStep {
  using Cursor = typename Visits::Cursor;
  ATTN_HD void Bring(const Visits&, const Cursor&) const {}
  ATTN_HD auto Read(const Visits& of, const Cursor& at) const {
    return at.template Read<kStepRows>(of);
  }
};
template <class Visits, int kStepRows>
struct PlaceOfStep<Visits, kStepRows, true> {
  using Cursor = typename Visits::Cursor;
  ListedStep place;
  ATTN_HD void Bring(const Visits& of, const Cursor& at) {
    place = at.template Read<kStepRows>(of);
  }
  ATTN_HD ListedStep Read(const Visits&, const Cursor&) const { return place; }
};

template <class Rule, bool kListed = Rule::kListed, int kRows = kDqBlockRows>
class RowVisits;

template <class Rule>
class RowVisits<Rule, false, kDqBlockRows> {
 public:
  struct Ring {};
  ATTN_HD RowVisits(const ProblemDesc& problem, const SequenceDesc& sequence, const TileWork& tile,
                    int first_key, int end_key, Ring&)
      : problem_(problem),
        tiles_(RowTiles(VisibilityOf(sequence), first_key, end_key, kDqBlockRows)),
        kv_head_(tile.head) {}
  ATTN_HD int rounds() const { return tiles_.count() * problem_.group; }
  ATTN_HD int first_head() const { return kv_head_ * problem_.group; }
  ATTN_HD void Open(int /*thread*/) const {}
  ATTN_HD void Advance(int /*round*/, int /*thread*/) const {}

  class Cursor {
   public:
    ATTN_HD explicit Cursor(const RowVisits& of) : head_(of.first_head()), row_(of.first_row()) {}
    template <int kStepRows>
    ATTN_HD RangeStep Read(const RowVisits& of) const {
      const uint32_t place = static_cast<uint32_t>(row_ - of.first_row());
      return {row_, {of.tiles_, static_cast<int>(place / uint32_t{kDqBlockRows})}};
    }
    template <int kStepRows>
    ATTN_HD int Head(const RowVisits&) const {
      return head_;
    }
    // Tells whether another head begins.
    template <int kStepRows>
    ATTN_HD bool Advance(const RowVisits& of, const RangeStep& /*here*/) {
      const int head = head_;
      row_ += kStepRows;
      if (row_ >= of.end_row()) {
        row_ = of.first_row();
        ++head_;
      }
      return head_ != head;
    }

   private:
    int head_, row_;
  };
  struct RoundCursor {
    int head, left;
    ATTN_HD explicit RoundCursor(const RowVisits& of)
        : head(of.first_head()), left(of.tiles_.count()) {}
    // Tells whether this round's place has only now become known.
    ATTN_HD bool Begin(const RowVisits&, int /*round*/) { return false; }
    // False when the next round is not the next 64 rows of the same head.
    ATTN_HD bool Advance(const RowVisits& of) {
      if (--left > 0) return true;
      ++head;
      left = of.tiles_.count();
      return false;
    }
    ATTN_HD int row(const RowVisits& of) const { return of.tiles_.First(of.tiles_.count() - left); }
  };
  // Round n's; slow.
  ATTN_HD int HeadOf(int n) const { return first_head() + n / tiles_.count(); }
  ATTN_HD int RowOf(int n) const { return tiles_.First(n % tiles_.count()); }

 private:
  ATTN_HD int first_row() const { return tiles_.First(0); }
  ATTN_HD int end_row() const { return tiles_.First(tiles_.count()); }

  const ProblemDesc& problem_;
  TileVisits tiles_;
  int kv_head_;
};

template <class Rule, int kRows>
class RowVisits<Rule, true, kRows> {
 public:
  static constexpr int kSize = 8, kAhead = 3;
  struct Ring {
    uint2 rounds[kSize];  // visit and query head of round n, at n % kSize
    uint32_t bitmaps[kSize];
    int count;  // of rounds; read back from here, since the compiler then knows it to be alike for
                // all threads
    // Of the thread that fills it: the head whose tiles come next, and which.
    ListedTiles tiles;
    int head, n;
  };
  ATTN_HD RowVisits(const ProblemDesc& problem, const SequenceDesc& sequence, const TileWork& tile,
                    int first_key, int end_key, Ring& ring)
      : problem_(problem),
        sequence_(sequence),
        tile_(tile),
        first_key_(first_key),
        end_key_(end_key),
        ring_(ring),
        rounds_(0),
        next_(0) {}
  ATTN_HD int rounds() const { return rounds_; }
  ATTN_HD int first_head() const { return tile_.head * problem_.group; }

  // Counts, and brings the first rounds. All threads of the block call it.
  ATTN_HD void Open(int thread) {
    uint32_t count = 0;
    for (int h = thread & 31; h < problem_.group; h += 32) {
      count += static_cast<uint32_t>(TilesOf(first_head() + h).count());
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask <<= 1) count += ptx::ShuffleXor(count, mask);
    if (thread == 0) {
      ptx::StoreShared32(&ring_.count, count);
      ring_.head = first_head();
      ring_.tiles = TilesOf(ring_.head);
      ring_.n = -1;
      LoadNext();
      for (int round = 0; round < kAhead; ++round) Advance(round - kAhead, thread);
    }
    ptx::SyncThreads();
    rounds_ = static_cast<int>(ptx::LoadShared32(&ring_.count));
  }
  // Brings, at the head of a round, the one kAhead later. Beyond the last there is no head.
  ATTN_HD void Advance(int round, int thread) {
    if (thread != 0) return;
    const int head = ring_.head, place = (round + kAhead) & (kSize - 1);
    uint32_t word = head < end_head() ? ring_.tiles.Visit(next_).word : 0;
    ptx::StoreShared32(&ring_.bitmaps[place], ring_.tiles.Bitmap(next_));
    LoadNext();
    if (ring_.head != head) word |= ListedVisit::kEndsHead;
    ptx::StoreShared64(&ring_.rounds[place], make_uint2(word, static_cast<uint32_t>(head)));
  }

  // All that it has to remember is how far it is.
  class Cursor {
   public:
    ATTN_HD explicit Cursor(const RowVisits&) : step_(0) {}
    template <int kStepRows>
    ATTN_HD ListedStep Read(const RowVisits& of) const {
      const ListedVisit visit = {of.Round(Round<kStepRows>()).x};
      return {visit.First() + step_ % (kRows / kStepRows) * kStepRows, visit};
    }
    template <int kStepRows>
    ATTN_HD int Head(const RowVisits& of) const {
      return static_cast<int>(of.Round(Round<kStepRows>()).y);
    }
    // The bitmap of a masked one.
    template <int kStepRows>
    ATTN_HD uint32_t Bitmap(const RowVisits& of) const {
      return ptx::LoadShared32(&of.ring_.bitmaps[Round<kStepRows>() & (kSize - 1)]);
    }
    // Tells whether another head begins. `here` is what Read returned.
    template <int kStepRows>
    ATTN_HD bool Advance(const RowVisits&, const ListedStep& here) {
      ++step_;
      return here.visit.EndsHead() && step_ % (kRows / kStepRows) == 0;
    }

   private:
    template <int kStepRows>
    ATTN_HD int Round() const {
      return step_ / (kRows / kStepRows);
    }
    int step_;
  };
  struct RoundCursor {
    int head;
    ATTN_HD explicit RoundCursor(const RowVisits&) : head(0), row_(0) {}
    ATTN_HD bool Begin(const RowVisits& of, int round) {
      const uint2 at = of.Round(round);
      head = static_cast<int>(at.y);
      row_ = ListedVisit{at.x}.First();
      return true;
    }
    ATTN_HD bool Advance(const RowVisits&) { return true; }
    ATTN_HD int row(const RowVisits&) const { return row_; }

   private:
    int row_;
  };
  ATTN_HD int HeadOf(int n) const { return Find(n).head; }
  ATTN_HD int RowOf(int n) const { return Find(n).row; }

 private:
  struct Found {
    int head, row;
  };
  ATTN_HD int end_head() const { return first_head() + problem_.group; }
  ATTN_HD ListedTiles TilesOf(int head) const {
    return ListedTiles(RowTiles(VisibilityOf(sequence_), first_key_, end_key_, kRows),
                       problem_.tile_lists, Rule::VisitFlags(problem_) | NonFiniteFlag(),
                       tile_.batch, head, tile_.tile);
  }
  ATTN_HD uint32_t NonFiniteFlag() const {
    const uint32_t* bounds = GradientBounds(problem_, tile_.batch, tile_.head);
    return ptx::LoadConstant32(bounds + kNonFiniteRows) ? uint32_t{ListedVisit::kNonFinite} : 0u;
  }
  ATTN_HD uint2 Round(int n) const { return ptx::LoadShared64(&ring_.rounds[n & (kSize - 1)]); }
  ATTN_HD void LoadNext() {
    ++ring_.n;
    while (ring_.head < end_head() && ring_.n >= ring_.tiles.count()) {
      ++ring_.head;
      ring_.n = 0;
      if (ring_.head < end_head()) ring_.tiles = TilesOf(ring_.head);
    }
    if (ring_.head < end_head()) next_ = ring_.tiles.Load(ring_.n);
  }
  ATTN_HD Found Find(int n) const {
    int head = first_head();
    for (;; ++head) {
      const ListedTiles tiles = TilesOf(head);
      if (n < tiles.count()) return {head, tiles.Visit(tiles.Load(n)).First()};
      n -= tiles.count();
    }
  }

  const ProblemDesc& problem_;
  const SequenceDesc& sequence_;
  TileWork tile_;
  int first_key_, end_key_;
  Ring& ring_;
  int rounds_;
  uint32_t next_;  // loaded; of the round after the ring's last
};

}  // namespace attnd
