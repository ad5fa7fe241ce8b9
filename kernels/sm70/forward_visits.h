// The tiles of keys that a forward block visits, as its two roles ask for them: the n-th, where n
// is at most kAhead steps ahead of the output role's (Any: whichever, but slowly).
//   Rule::kListed = false   an interval, worked out where it is asked for
//   Rule::kListed = true    listed tiles: one thread brings the list and keeps the next visits in a
//                           ring in shared memory, so that no role waits for global memory
#pragma once

#include "kernels/rules/score_rules.h"

namespace attnd::sm70 {

template <class Rule, int kStepKeys, bool kListed = Rule::kListed>
class KeyVisits;

template <class Rule, int kStepKeys>
class KeyVisits<Rule, kStepKeys, false> {
 public:
  struct Ring {};
  ATTN_HD KeyVisits(const ProblemDesc&, const SequenceDesc& sequence, const TileWork&,
                    int first_row, int end_row, Ring&)
      : tiles_(KeyTiles(VisibilityOf(sequence), first_row, end_row, kStepKeys)) {}
  ATTN_HD int count() const { return tiles_.count(); }
  ATTN_HD RangeVisit At(int n) const { return {tiles_, n}; }
  ATTN_HD RangeVisit Any(int n) const { return {tiles_, n}; }
  ATTN_HD void Open(int /*thread*/) const {}
  ATTN_HD void Advance(int /*step*/, int /*thread*/) const {}

 private:
  TileVisits tiles_;
};

template <class Rule, int kStepKeys>
class KeyVisits<Rule, kStepKeys, true> {
 public:
  static constexpr int kSize = 8, kAhead = 4;
  // Visit n is at n % kSize from when the score role makes step n − kAhead until all are past n.
  // The score role is the one that waits for the other.
  struct Ring {
    uint32_t visits[kSize], bitmaps[kSize];
    int count;  // read back from here: a number that the compiler knows to be alike for all threads
  };
  ATTN_HD KeyVisits(const ProblemDesc& problem, const SequenceDesc& sequence, const TileWork& tile,
                    int first_row, int end_row, Ring& ring)
      : tiles_(KeyTiles(VisibilityOf(sequence), first_row, end_row, kStepKeys), problem.tile_lists,
               Rule::VisitFlags(problem) | RaggedFlag(end_row), tile.batch, tile.head, tile.tile),
        ring_(ring),
        count_(0),
        next_(0) {}
  ATTN_HD int count() const { return count_; }
  ATTN_HD ListedVisit At(int n) const {
    return {ptx::LoadShared32(&ring_.visits[n & (kSize - 1)])};
  }
  // Returns the bitmap of a masked visit.
  ATTN_HD uint32_t BitmapAt(int n) const {
    return ptx::LoadShared32(&ring_.bitmaps[n & (kSize - 1)]);
  }
  ATTN_HD ListedVisit Any(int n) const { return tiles_.Visit(tiles_.Load(n)); }
  ATTN_HD const ListedTiles& tiles() const { return tiles_; }
  // Brings the first visits. All threads of the block call it.
  ATTN_HD void Open(int thread) {
    if (thread == 0) ptx::StoreShared32(&ring_.count, static_cast<uint32_t>(tiles_.count()));
    if (thread < kAhead && thread < tiles_.count()) Put(thread, tiles_.Load(thread));
    if (tiles_.count() > kAhead) next_ = tiles_.Load(kAhead);
    ptx::SyncThreads();
    count_ = static_cast<int>(ptx::LoadShared32(&ring_.count));
  }
  // The score role, whose step this is, calls it.
  ATTN_HD void Advance(int step, int thread) {
    if (thread != 0 || step + kAhead >= count()) return;
    Put(step + kAhead, next_);
    if (step + kAhead + 1 < count()) next_ = tiles_.Load(step + kAhead + 1);
  }

 private:
  // Rows beyond the sequence, in its last warp, see nothing in any visit: a warp's rows move their
  // stabilisers together, which must not depend on the size of tiles.
  ATTN_HD static uint32_t RaggedFlag(int end_row) {
    return end_row % kMaskSquare != 0 ? uint32_t{ListedVisit::kCut} : 0u;
  }
  ATTN_HD void Put(int n, uint32_t loaded) const {
    ptx::StoreShared32(&ring_.visits[n & (kSize - 1)], tiles_.Visit(loaded).word);
    ptx::StoreShared32(&ring_.bitmaps[n & (kSize - 1)], tiles_.Bitmap(loaded));
  }

  ListedTiles tiles_;
  Ring& ring_;
  int count_;
  uint32_t next_;  // loaded, of the step after the ring's last
};

}  // namespace attnd::sm70
