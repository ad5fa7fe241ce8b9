// The tiles of keys that a forward block visits, one after the other; every thread knows them.
//   Rule::kListed = false   an interval, worked out where it is asked for
//   Rule::kListed = true    listed tiles, loaded two visits ahead
// Errors: none.
#pragma once

#include "kernels/rules/score_rules.h"

namespace attnd::sm80 {

template <class Rule, bool kListed = Rule::kListed>
class KeyVisits;

template <class Rule>
class KeyVisits<Rule, false> {
 public:
  ATTN_HD KeyVisits(const ProblemDesc&, const SequenceDesc& sequence, const TileWork&,
                    int first_row, int end_row, int tile_keys)
      : tiles_(KeyTiles(VisibilityOf(sequence), first_row, end_row, tile_keys)), n_(0) {}
  ATTN_HD int count() const { return tiles_.count(); }
  ATTN_HD RangeVisit Any(int n) const { return {tiles_, n}; }
  // The visit at hand, and where the one after it begins, if there is one.
  ATTN_HD RangeVisit Here() const { return {tiles_, n_}; }
  ATTN_HD int NextFirst() const { return tiles_.First(n_ + 1); }
  ATTN_HD uint32_t Bitmap() const { return 0; }
  ATTN_HD void Advance() { ++n_; }

 private:
  TileVisits tiles_;
  int n_;
};

template <class Rule>
class KeyVisits<Rule, true> {
 public:
  ATTN_HD KeyVisits(const ProblemDesc& problem, const SequenceDesc& sequence, const TileWork& tile,
                    int first_row, int end_row, int tile_keys)
      : tiles_(KeyTiles(VisibilityOf(sequence), first_row, end_row, tile_keys), problem.tile_lists,
               Rule::VisitFlags(problem), tile.batch, tile.head, tile.tile),
        n_(0),
        here_(LoadIf(0)),
        next_(LoadIf(1)) {}
  ATTN_HD int count() const { return tiles_.count(); }
  ATTN_HD ListedVisit Any(int n) const { return tiles_.Visit(tiles_.Load(n)); }
  ATTN_HD ListedVisit Here() const { return tiles_.Visit(here_); }
  ATTN_HD int NextFirst() const { return tiles_.Visit(next_).First(); }
  // Returns the bitmap of a masked visit.
  ATTN_HD uint32_t Bitmap() const { return tiles_.Bitmap(here_); }
  ATTN_HD void Advance() {
    here_ = next_;
    ++n_;
    next_ = LoadIf(n_ + 1);
  }

 private:
  ATTN_HD uint32_t LoadIf(int n) const { return n < tiles_.count() ? tiles_.Load(n) : 0; }

  ListedTiles tiles_;
  int n_;
  uint32_t here_, next_;
};

}  // namespace attnd::sm80
