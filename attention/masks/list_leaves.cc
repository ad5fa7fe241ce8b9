// Lists, searched: a rectangle is looked at row by row (column by column), until something visible
// and something hidden have been found.
#include <algorithm>
#include <utility>

#include "attention/masks/mask_leaf.h"
#include "base/check.h"

namespace attnd {
namespace {

// Where run [begin, end) leaves [from, to).
Seen Covers(int64_t begin, int64_t end, int64_t from, int64_t to) {
  if (begin <= from && end >= to) return Seen::kAll;
  return end <= from || begin >= to ? Seen::kNone : Seen::kMixed;
}
Seen Not(Seen seen) {
  return seen == Seen::kMixed ? seen : seen == Seen::kAll ? Seen::kNone : Seen::kAll;
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
  bool CopyRow(const MaskRect& rect, uint32_t* words) const override {
    for (int64_t key = rect.key_begin; key < rect.key_end; key += 32) {
      *words++ =
          static_cast<uint32_t>(Bits(rect.row, key, std::min<int64_t>(32, rect.key_end - key)));
    }
    return true;
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
  if (auto* list = std::get_if<BlockList>(&pattern)) return MakeBlocksLeaf(*list, wanted);
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

}  // namespace attnd
