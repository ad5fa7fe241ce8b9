// Which tiles a block visits, in order, each tagged FULL (every score of it is visible: no mask
// code runs) or PARTIAL. Tiles with no visible score are not visited. Loops ask for the n-th visit
// only, and learn from it where the tile starts and what is hidden in it:
//   RangeVisits    tiles of an interval; those at its ends are cut
//   ListedVisits   those tiles of such an interval that a mask lists (TileLists, params.h)
// A visit, of either kind: First(), the tile's first position; IsCut(), causal, window or lengths
// hide some of it; IsMasked(), its bitmap does; IsPartial(), anything may.
#pragma once

#include "attention/score_rule.h"
#include "base/hd.h"
#include "kernels/rules/tile_lists.h"

namespace attnd {

// Tiles of `size` positions (keys in forward, rows in backward) that hold a position of `any`;
// those that reach out of `all` are cut.
class TileVisits {
 public:
  ATTN_HD TileVisits(Range any, Range all, int size) : size_(size) {
    int first = any.begin / size, last = (any.end + size - 1) / size;
    first_ = first * size;
    count_ = any.begin < any.end ? last - first : 0;
    int full_begin = (all.begin + size - 1) / size, full_end = all.end / size;
    full_begin_ = full_begin - first;
    full_count_ = full_end <= full_begin ? 0 : full_end - full_begin;
  }
  ATTN_HD int size() const { return size_; }
  ATTN_HD int count() const { return count_; }
  ATTN_HD int First(int visit) const { return first_ + visit * size_; }
  ATTN_HD bool IsCut(int visit) const {
    return static_cast<uint32_t>(visit - full_begin_) >= static_cast<uint32_t>(full_count_);
  }

 private:
  int size_, first_, count_, full_begin_, full_count_;
};

// Tiles of keys that rows [row_begin, row_end) of a sequence see.
ATTN_HD TileVisits KeyTiles(Visibility visibility, int row_begin, int row_end, int tile_keys) {
  return TileVisits(VisibleKeys(visibility, row_begin, row_end),
                    KeysVisibleToAll(visibility, row_begin, row_end), tile_keys);
}

// Tiles of rows that see at least one of the keys [key_begin, key_end).
ATTN_HD TileVisits RowTiles(Visibility visibility, int key_begin, int key_end, int tile_rows) {
  return TileVisits(RowsThatSee(visibility, key_begin, key_end),
                    RowsThatSeeAll(visibility, key_begin, key_end), tile_rows);
}

struct RangeVisit {
  const TileVisits& tiles;
  int n;
  ATTN_HD int First() const { return tiles.First(n); }
  ATTN_HD bool IsCut() const { return tiles.IsCut(n); }
  ATTN_HD bool IsMasked() const { return false; }
  ATTN_HD bool IsPartial() const { return IsCut(); }
};

// In one word: tiles start at multiples of 32.
struct ListedVisit {
  enum Flag : uint32_t { kCut = 1, kMasked = 2, kOther = 4, kNonFinite = 8, kEndsHead = 16 };
  uint32_t word;
  ATTN_HD int First() const { return static_cast<int>(word & ~31u); }
  ATTN_HD bool IsCut() const { return word & kCut; }
  ATTN_HD bool IsMasked() const { return word & kMasked; }
  ATTN_HD bool IsPartial() const { return word & 7u; }
  // Visits of backward also tell whether the head has rows that are not finite (non_finite_rows.h),
  // and whether this is the last of its tiles.
  ATTN_HD bool HasNonFiniteRows() const { return word & kNonFinite; }
  ATTN_HD bool EndsHead() const { return word & kEndsHead; }
};

// The tiles of an interval that are listed; all of them where there are no lists. `flags`: of every
// visit.
class ListedTiles {
 public:
  ATTN_HD ListedTiles(TileVisits range, const TileLists& lists, uint32_t flags, int batch, int head,
                      int own_tile)
      : range_(range),
        first_(range.First(0) / range.size()),
        list_(nullptr),
        count_(range.count()),
        flags_(flags),
        every_(0),
        first_bitmap_(0) {
    if (lists.lines == nullptr || count_ == 0) return;
    MaskLine line = LineOf(lists, batch, head, own_tile);
    first_bitmap_ = line.bitmap;
    if (lists.run != 0) line = RunOf(line, lists.run);
    if (lists.line_tiles == 1) {  // what is listed holds for every tile
      if (line.begin == line.end) count_ = 0;
      if (count_ > 0) every_ = ptx::LoadConstant32(lists.tiles + line.begin) & ~kListedTileMask;
      return;
    }
    const uint32_t begin = FirstListed(lists.tiles, line.begin, line.end, first_);
    const uint32_t end = FirstListed(lists.tiles, line.begin, line.end, first_ + count_);
    list_ = lists.tiles + begin;
    count_ = static_cast<int>(end - begin);
  }
  ATTN_HD int count() const { return count_; }
  // Visit n < count() in two parts: what is loaded, and what is worked out from it.
  ATTN_HD uint32_t Load(int n) const {
    if (list_ != nullptr) return ptx::LoadConstant32(list_ + n);
    return static_cast<uint32_t>(first_ + n) | every_;
  }
  ATTN_HD ListedVisit Visit(uint32_t loaded) const {
    const int tile = static_cast<int>(loaded & kListedTileMask);
    uint32_t word = static_cast<uint32_t>(tile * range_.size()) | flags_;
    if (loaded >> kListedTileBits) word |= ListedVisit::kMasked;
    if (range_.IsCut(tile - first_)) word |= ListedVisit::kCut;
    return {word};
  }
  // The bitmap of a masked one.
  ATTN_HD uint32_t Bitmap(uint32_t loaded) const {
    return first_bitmap_ + (loaded >> kListedTileBits) - 1;
  }

 private:
  TileVisits range_;
  int first_;             // tile of the interval
  const uint32_t* list_;  // the first listed tile of the interval
  int count_;
  uint32_t flags_, every_, first_bitmap_;
};

}  // namespace attnd
