// Lists, searched: a rectangle is looked at row by row (column by column), until something visible
// and something hidden have been found.
#include <algorithm>
#include <utility>

#include "attention/masks/mask_leaf.h"
#include "base/check.h"

namespace attnd {
namespace {

int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return a % b < 0 ? quotient - 1 : quotient;
}
bool BitAt(const uint8_t* bytes, int64_t bit) { return bytes[bit / 8] >> (bit % 8) & 1; }

// What has been found of a rectangle, line after line.
class Finding {
 public:
  // Whether both were found, so that no other line matters.
  bool Add(Seen line) {
    is_visible_ |= line != Seen::kNone;
    is_hidden_ |= line != Seen::kAll;
    return is_visible_ && is_hidden_;
  }
  Seen result() const {
    return !is_hidden_ ? Seen::kAll : is_visible_ ? Seen::kMixed : Seen::kNone;
  }

 private:
  bool is_visible_ = false, is_hidden_ = false;
};

// Where run [begin, end) leaves [from, to).
Seen Covers(int64_t begin, int64_t end, int64_t from, int64_t to) {
  if (begin <= from && end >= to) return Seen::kAll;
  return end <= from || begin >= to ? Seen::kNone : Seen::kMixed;
}
Seen Not(Seen seen) {
  return seen == Seen::kMixed ? seen : seen == Seen::kAll ? Seen::kNone : Seen::kAll;
}

// ---- Blocks.

constexpr uint32_t kFullBlock = 0xffffffff;

// Blocks by rows of blocks, of mask rows or of query positions.
struct BlockRows {
  bool counts_queries = false;
  int64_t bq = 0, bk = 0;
  int64_t first = 0;  // row of blocks that indptr[0] is of
  std::vector<uint32_t> indptr, indices;
  std::vector<uint32_t> bitmap;      // of each block, or kFullBlock; empty: all full
  const uint8_t* bitmaps = nullptr;  // row-major, of whole bytes each
};

class BlocksLeaf : public MaskLeaf {
 public:
  explicit BlocksLeaf(BlockRows rows)
      : rows_(std::move(rows)), bitmap_bytes_((rows_.bq * rows_.bk + 7) / 8) {
    if (rows_.bitmap.empty()) return;
    partial_before_.push_back(0);
    for (uint32_t bitmap : rows_.bitmap) {
      partial_before_.push_back(partial_before_.back() + (bitmap == kFullBlock ? 0 : 1));
    }
  }

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    const int64_t last = BlockRow(rect, rect.rows - 1);
    Finding finding;
    for (int64_t row = BlockRow(rect, 0); row <= last; ++row) {
      ++steps;
      if (finding.Add(OfRow(row, rect))) break;
    }
    return finding.result();
  }

  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t row = BlockRow(rect, 0);
    const auto [begin, end] = Listed(row, rect);
    const int64_t row_in_block = Line(rect) - row * rows_.bq;
    for (uint32_t n = begin; n < end; ++n) {
      const int64_t key = rows_.indices[n] * rows_.bk;
      if (IsFull(n)) {
        AppendClipped({key, key + rows_.bk}, rect.key_begin, rect.key_end, runs);
      } else {
        AppendBits(n, row_in_block, rect, runs);
      }
    }
    return CountPartial(begin, end) > 0 ? 1 : rows_.bq - row_in_block;
  }

  // Where the first block begins, and which blocks are listed.
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    constexpr size_t kMostNumbers = 64;
    const int64_t first = BlockRow(rect, 0), last = BlockRow(rect, rect.rows - 1);
    const size_t before = shape.size();
    shape.push_back(Line(rect) - first * rows_.bq);
    shape.push_back(rect.key_begin % rows_.bk);
    for (int64_t row = first; row <= last; ++row) {
      const auto [begin, end] = Listed(row, rect);
      if (shape.size() + 2 * (end - begin) > before + kMostNumbers) return false;
      for (uint32_t n = begin; n < end; ++n) {
        shape.push_back((row - first) << 32 | (rows_.indices[n] - rect.key_begin / rows_.bk));
        shape.push_back(IsFull(n) ? kFullBlock : rows_.bitmap[n]);
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kShortRow = 8;  // blocks that are sooner walked than searched
  struct Range {
    uint32_t begin, end;
  };

  int64_t Line(const MaskRect& rect) const { return rows_.counts_queries ? rect.query : rect.row; }
  int64_t BlockRow(const MaskRect& rect, int64_t row) const {
    return FloorDivide(Line(rect) + row, rows_.bq);
  }
  bool IsFull(uint32_t n) const { return rows_.bitmap.empty() || rows_.bitmap[n] == kFullBlock; }
  uint32_t CountPartial(uint32_t begin, uint32_t end) const {
    return rows_.bitmap.empty() ? 0 : partial_before_[end] - partial_before_[begin];
  }

  // The blocks of one row that the rectangle's keys touch.
  Range Listed(int64_t row, const MaskRect& rect) const {
    const auto begin = rows_.indices.begin() + rows_.indptr[static_cast<size_t>(row - rows_.first)];
    const auto end =
        rows_.indices.begin() + rows_.indptr[static_cast<size_t>(row - rows_.first + 1)];
    const int64_t first = rect.key_begin / rows_.bk, last = rect.last_key() / rows_.bk;
    auto from = begin, to = end;
    if (end - begin <= kShortRow) {
      while (from != end && *from < first) ++from;
      for (to = from; to != end && *to <= last; ++to) {
      }
    } else {
      from = std::lower_bound(begin, end, first);
      to = std::upper_bound(from, end, last);
    }
    return {static_cast<uint32_t>(from - rows_.indices.begin()),
            static_cast<uint32_t>(to - rows_.indices.begin())};
  }
  Seen OfRow(int64_t row, const MaskRect& rect) const {
    const auto [begin, end] = Listed(row, rect);
    if (begin == end) return Seen::kNone;
    const int64_t columns = rect.last_key() / rows_.bk - rect.key_begin / rows_.bk + 1;
    if (end - begin < columns || CountPartial(begin, end) > 0) return Seen::kMixed;
    return Seen::kAll;
  }
  void AppendBits(uint32_t n, int64_t row_in_block, const MaskRect& rect,
                  std::vector<KeyRun>& runs) const {
    const uint8_t* bits = rows_.bitmaps + rows_.bitmap[n] * bitmap_bytes_;
    const int64_t key = rows_.indices[n] * rows_.bk, first_bit = row_in_block * rows_.bk - key;
    const int64_t end = std::min(key + rows_.bk, rect.key_end);
    for (int64_t j = std::max(key, rect.key_begin); j < end; ++j) {
      if (!BitAt(bits, first_bit + j)) continue;
      const int64_t begin = j;
      while (j < end && BitAt(bits, first_bit + j)) ++j;
      runs.push_back({begin, j});
    }
  }

  const BlockRows rows_;
  const int64_t bitmap_bytes_;
  std::vector<uint32_t> partial_before_;
};

std::unique_ptr<MaskLeaf> MakeBlocks(const BlockList& list, BlocksWanted wanted) {
  BlockRows rows = {.bq = list.bq, .bk = list.bk, .indptr = {0}, .bitmaps = list.bitmaps.data()};
  const bool has_bitmaps = wanted == BlocksWanted::kBoth && !list.kind.empty();
  size_t partial = 0;
  for (size_t row = 0; row + 1 < list.indptr.size(); ++row) {
    for (size_t n = list.indptr[row]; n < list.indptr[row + 1]; ++n) {
      const bool is_full = list.kind.empty() || list.kind[n] == 0;
      if (has_bitmaps) rows.bitmap.push_back(is_full ? kFullBlock : list.bitmap_of[partial++]);
      if (wanted == BlocksWanted::kBoth || is_full == (wanted == BlocksWanted::kFull)) {
        rows.indices.push_back(list.indices[n]);
      }
    }
    rows.indptr.push_back(static_cast<uint32_t>(rows.indices.size()));
  }
  return std::make_unique<BlocksLeaf>(std::move(rows));
}

// ---- Runs. What is empty stands at the end of a line, with end 0.

// The number of a line's runs that are not empty.
size_t RunsOf(const uint32_t* end, uint32_t most) {
  return static_cast<size_t>(
      std::partition_point(end, end + most, [](uint32_t e) { return e != 0; }) - end);
}

// How the runs of one line, ascending, leave [from, to).
Seen CoveredBy(const uint32_t* begin, const uint32_t* end, uint32_t most, int64_t from,
               int64_t to) {
  const size_t count = RunsOf(end, most);
  const size_t n = static_cast<size_t>(std::upper_bound(end, end + count, from) - end);
  return n == count ? Seen::kNone : Covers(begin[n], end[n], from, to);
}

class RowIntervalsLeaf : public MaskLeaf {
 public:
  explicit RowIntervalsLeaf(const RowIntervals& runs) : runs_(runs) {}

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    Finding finding;
    for (int64_t row = rect.row; row < rect.row + rect.rows; ++row) {
      ++steps;
      const size_t at = static_cast<size_t>(row * runs_.r);
      if (finding.Add(
              CoveredBy(&runs_.begin[at], &runs_.end[at], runs_.r, rect.key_begin, rect.key_end))) {
        break;
      }
    }
    return finding.result();
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const size_t at = static_cast<size_t>(rect.row * runs_.r);
    const uint32_t* end = &runs_.end[at];
    const size_t count = RunsOf(end, runs_.r);
    size_t n = static_cast<size_t>(std::upper_bound(end, end + count, rect.key_begin) - end);
    for (; n < count && runs_.begin[at + n] < rect.key_end; ++n) {
      AppendClipped({runs_.begin[at + n], end[n]}, rect.key_begin, rect.key_end, runs);
    }
    return 1;
  }

 private:
  const RowIntervals& runs_;
};

class ColRunsLeaf : public MaskLeaf {
 public:
  explicit ColRunsLeaf(const ColRuns& runs) : runs_(runs) {}

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    Finding finding;
    for (int64_t key = rect.key_begin; key < rect.key_end; ++key) {
      ++steps;
      const size_t at = static_cast<size_t>(key * runs_.m);
      const Seen hidden =
          CoveredBy(&runs_.start[at], &runs_.end[at], runs_.m, rect.row, rect.row + rect.rows);
      if (finding.Add(Not(hidden))) break;
    }
    return finding.result();
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    int64_t same = rect.rows;
    for (int64_t key = rect.key_begin; key < rect.key_end; ++key) {
      if (IsHidden(key, rect.row, same)) continue;
      if (!runs.empty() && runs.back().end == key) {
        ++runs.back().end;
      } else {
        runs.push_back({key, key + 1});
      }
    }
    return same;
  }

 private:
  // Lowers `same` to the rows for which the answer holds.
  bool IsHidden(int64_t key, int64_t row, int64_t& same) const {
    const size_t at = static_cast<size_t>(key * runs_.m);
    const uint32_t* end = &runs_.end[at];
    const size_t count = RunsOf(end, runs_.m);
    const size_t n = static_cast<size_t>(std::upper_bound(end, end + count, row) - end);
    if (n == count) return false;
    const bool is_hidden = runs_.start[at + n] <= row;
    same = std::min(same, (is_hidden ? end[n] : runs_.start[at + n]) - row);
    return is_hidden;
  }

  const ColRuns& runs_;
};

class RowRunsLeaf : public MaskLeaf {
 public:
  explicit RowRunsLeaf(const RowRuns& runs) : runs_(runs) {}

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    Finding finding;
    for (int64_t row = rect.row; row < rect.row + rect.rows; ++row) {
      steps += runs_.r;
      if (finding.Add(OfRow(row, rect))) break;
    }
    return finding.result();
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    std::vector<KeyRun> found;
    for (int64_t n = rect.row * runs_.r; n < (rect.row + 1) * runs_.r; ++n) {
      const auto [first, stride, end] = At(n);
      if (stride == 1) {
        AppendClipped({first, end}, rect.key_begin, rect.key_end, found);
        continue;
      }
      for (int64_t key = From(first, stride, rect); key < std::min(end, rect.key_end);
           key += stride) {
        found.push_back({key, key + 1});
      }
    }
    found = Union(std::move(found));
    runs.insert(runs.end(), found.begin(), found.end());
    return 1;
  }

 private:
  struct Progression {
    int64_t first, stride, end;
  };
  Progression At(int64_t n) const {
    const size_t at = static_cast<size_t>(n);
    const int64_t first = runs_.first[at], stride = runs_.stride[at];
    return {first, stride,
            runs_.count[at] == 0 ? first : first + stride * (runs_.count[at] - 1) + 1};
  }
  // The first key of a progression at or after the rectangle's first one.
  static int64_t From(int64_t first, int64_t stride, const MaskRect& rect) {
    const int64_t skipped = std::max<int64_t>(0, rect.key_begin - first);
    return first + (skipped + stride - 1) / stride * stride;
  }
  Seen OfRow(int64_t row, const MaskRect& rect) const {
    bool is_visible = false;
    for (int64_t n = row * runs_.r; n < (row + 1) * runs_.r; ++n) {
      const auto [first, stride, end] = At(n);
      if (stride == 1 && first <= rect.key_begin && end >= rect.key_end) return Seen::kAll;
      is_visible |= From(first, stride, rect) < std::min(end, rect.key_end);
    }
    return is_visible ? Seen::kMixed : Seen::kNone;
  }

  const RowRuns& runs_;
};

// ---- Rectangles and bits.

class RectanglesLeaf : public MaskLeaf {
 public:
  explicit RectanglesLeaf(const Rectangles& rectangles) : of_(rectangles.of) {
    uint32_t most = 0;
    for (const MaskRectangle& r : of_) latest_end_.push_back(most = std::max(most, r.row_end));
  }

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    bool is_visible = false;
    for (size_t n = First(rect.row); n < of_.size() && of_[n].row_begin <= rect.last_row(); ++n) {
      ++steps;
      const Seen seen = By(of_[n], rect);
      if (seen == Seen::kAll) return seen;
      is_visible |= seen != Seen::kNone;
    }
    return is_visible ? Seen::kMixed : Seen::kNone;
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    std::vector<KeyRun> found;
    for (size_t n = First(rect.row); n < of_.size() && of_[n].row_begin <= rect.row; ++n) {
      if (of_[n].row_end <= rect.row) continue;
      const KeyRun run = KeysAt(of_[n], rect.row);
      AppendClipped(run, rect.key_begin, rect.key_end, found);
    }
    found = Union(std::move(found));
    runs.insert(runs.end(), found.begin(), found.end());
    return 1;
  }

 private:
  // Sorted by their first rows: none before this one reaches `row`.
  size_t First(int64_t row) const {
    return static_cast<size_t>(std::upper_bound(latest_end_.begin(), latest_end_.end(), row) -
                               latest_end_.begin());
  }
  // The keys that a rectangle shows a row of its own.
  static KeyRun KeysAt(const MaskRectangle& r, int64_t row) {
    KeyRun keys = {r.key_begin, r.key_end};
    const bool is_band = r.shape == RectangleShape::kBand;
    if (is_band || r.shape == RectangleShape::kCausal) {
      keys.end = std::min<int64_t>(keys.end, int64_t{r.key_end} - r.row_end + row + 1);
    }
    if (is_band || r.shape == RectangleShape::kInverseCausal) {
      keys.begin = std::max<int64_t>(keys.begin, int64_t{r.key_begin} + row - r.row_begin);
    }
    return keys;
  }
  static Seen By(const MaskRectangle& r, const MaskRect& rect) {
    const int64_t first = std::max<int64_t>(rect.row, r.row_begin);
    const int64_t last = std::min<int64_t>(rect.last_row(), int64_t{r.row_end} - 1);
    if (first > last) return Seen::kNone;
    const KeyRun upper = KeysAt(r, first), lower = KeysAt(r, last);
    // Both ends only rise from row to row.
    const int64_t widest_end = lower.end, least_begin = upper.begin;
    if (widest_end <= rect.key_begin || least_begin >= rect.key_end) return Seen::kNone;
    const bool has_rows = first == rect.row && last == rect.last_row();
    return has_rows && upper.end >= rect.key_end && lower.begin <= rect.key_begin ? Seen::kAll
                                                                                  : Seen::kMixed;
  }

  const std::vector<MaskRectangle>& of_;
  std::vector<uint32_t> latest_end_;  // of the rectangles up to this one
};

class BitmapLeaf : public MaskLeaf {
 public:
  explicit BitmapLeaf(const MaskBitmap& bits)
      : data_(bits.data), row_bytes_(bits.row_pitch_bits / 8) {}

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    Finding finding;
    for (int64_t row = rect.row; row < rect.row + rect.rows; ++row) {
      for (int64_t key = rect.key_begin; key < rect.key_end; key += 64) {
        ++steps;
        const int64_t keys = std::min<int64_t>(64, rect.key_end - key);
        const uint64_t bits = Bits(row, key, keys), ones = ~uint64_t{0} >> (64 - keys);
        const Seen seen = bits == 0 ? Seen::kNone : bits == ones ? Seen::kAll : Seen::kMixed;
        if (finding.Add(seen)) return Seen::kMixed;
      }
    }
    return finding.result();
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    for (int64_t key = rect.key_begin; key < rect.key_end; key += 64) {
      const int64_t keys = std::min<int64_t>(64, rect.key_end - key);
      uint64_t bits = Bits(rect.row, key, keys);
      for (int64_t at = key; bits != 0;) {
        const int zeros = __builtin_ctzll(bits);
        bits >>= zeros;
        const int ones = ~bits == 0 ? 64 : __builtin_ctzll(~bits);
        at += zeros;
        Append({at, at + ones}, runs);
        bits = ones == 64 ? 0 : bits >> ones;
        at += ones;
      }
    }
    return 1;
  }

 private:
  static void Append(KeyRun run, std::vector<KeyRun>& runs) {
    if (!runs.empty() && runs.back().end == run.begin) {
      runs.back().end = run.end;
    } else {
      runs.push_back(run);
    }
  }
  // `count` ≤ 64 bits from key `key` on, the first one lowest.
  uint64_t Bits(int64_t row, int64_t key, int64_t count) const {
    const uint8_t* from = data_.data() + row * row_bytes_ + key / 8;
    const int64_t shift = key % 8, bytes = (shift + count + 7) / 8;
    uint64_t bits = 0;
    for (int64_t n = 0; n < std::min<int64_t>(bytes, 8); ++n) bits |= uint64_t{from[n]} << 8 * n;
    bits >>= shift;
    if (bytes == 9) bits |= uint64_t{from[8]} << (64 - shift);
    return bits & ~uint64_t{0} >> (64 - count);
  }

  const std::vector<uint8_t>& data_;
  const int64_t row_bytes_;
};

}  // namespace

std::unique_ptr<MaskLeaf> MakeListLeaf(const MaskPattern& pattern, BlocksWanted wanted) {
  if (auto* list = std::get_if<BlockList>(&pattern)) return MakeBlocks(*list, wanted);
  if (auto* runs = std::get_if<ColRuns>(&pattern)) return std::make_unique<ColRunsLeaf>(*runs);
  if (auto* runs = std::get_if<RowRuns>(&pattern)) return std::make_unique<RowRunsLeaf>(*runs);
  if (auto* runs = std::get_if<RowIntervals>(&pattern)) {
    return std::make_unique<RowIntervalsLeaf>(*runs);
  }
  if (auto* some = std::get_if<Rectangles>(&pattern)) {
    return std::make_unique<RectanglesLeaf>(*some);
  }
  auto* bits = std::get_if<MaskBitmap>(&pattern);
  CHECK(bits != nullptr) << "pattern " << pattern.index();
  return std::make_unique<BitmapLeaf>(*bits);
}

std::unique_ptr<MaskLeaf> MakeDrawnLeaf(DrawnBlocks blocks) {
  return std::make_unique<BlocksLeaf>(BlockRows{.counts_queries = true,
                                                .bq = blocks.block,
                                                .bk = blocks.block,
                                                .first = blocks.first,
                                                .indptr = std::move(blocks.indptr),
                                                .indices = std::move(blocks.indices)});
}

}  // namespace attnd
