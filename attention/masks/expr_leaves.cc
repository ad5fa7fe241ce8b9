// The closed forms of mask_spec.h as intervals: of d = J − Q, of J, of Q, of blocks or documents.
#include <algorithm>
#include <limits>

#include "attention/masks/mask_leaf.h"
#include "base/check.h"
#include "base/floor.h"

namespace attnd {
namespace {

constexpr int64_t kUnbounded = int64_t{1} << 60;

// Whether [low, high] lies inside [first, last].
Seen InInterval(int64_t low, int64_t high, int64_t first, int64_t last) {
  if (low >= first && high <= last) return Seen::kAll;
  return high < first || low > last ? Seen::kNone : Seen::kMixed;
}
Seen Either(Seen a, Seen b) {
  if (a == Seen::kAll || b == Seen::kAll) return Seen::kAll;
  return a == Seen::kNone && b == Seen::kNone ? Seen::kNone : Seen::kMixed;
}

// Where ascending `edges` change something inside (begin, end), relative to begin. False: in too
// many places.
bool AppendEdges(const std::vector<uint32_t>& edges, int64_t begin, int64_t end,
                 std::vector<int64_t>& shape) {
  constexpr int kMostEdges = 16;
  const auto first = std::upper_bound(edges.begin(), edges.end(), begin);
  const auto last = std::lower_bound(first, edges.end(), end);
  shape.push_back(last - first);
  if (last - first > kMostEdges) return false;
  for (auto edge = first; edge != last; ++edge) shape.push_back(*edge - begin);
  return true;
}

// low ≤ J − Q ≤ high and J − Q = residue mod p.
class DiagonalLeaf : public MaskLeaf {
 public:
  DiagonalLeaf(int64_t low, int64_t high, int64_t p, int64_t residue)
      : low_(low), high_(high), p_(p), residue_(residue) {}

  Seen Classify(const MaskRect& rect, int64_t&) const override {
    const int64_t from = rect.key_begin - rect.last_query(), to = rect.last_key() - rect.query;
    const Seen band = InInterval(from, to, low_, high_);
    if (p_ == 1 || band == Seen::kNone) return band;
    const int64_t first = from + FloorModulo(residue_ - from, p_);  // that fits
    if (first > to) return Seen::kNone;
    return from == to ? band : Seen::kMixed;
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t begin = std::max(rect.key_begin, rect.query + low_);
    const int64_t end = std::min(rect.key_end, rect.query + high_ + 1);
    if (p_ == 1) {
      if (begin < end) runs.push_back({begin, end});
      return 1;
    }
    int64_t key = begin + FloorModulo(residue_ + rect.query - begin, p_);
    for (; key < end; key += p_) runs.push_back({key, key + 1});
    return 1;
  }
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    shape.push_back(rect.key_begin - rect.query);
    return true;
  }

 private:
  const int64_t low_, high_, p_, residue_;
};

class StrideColLeaf : public MaskLeaf {
 public:
  explicit StrideColLeaf(const StrideCol& e) : p_(e.p), lo_(e.lo), hi_(e.hi) {}

  Seen Classify(const MaskRect& rect, int64_t&) const override {
    const int64_t from = rect.key_begin % p_, to = from + rect.keys() - 1;
    return Either(InInterval(from, to, lo_, hi_ - 1), InInterval(from, to, lo_ + p_, hi_ + p_ - 1));
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    for (int64_t n = rect.key_begin / p_; n * p_ < rect.key_end; ++n) {
      AppendClipped({n * p_ + lo_, n * p_ + hi_}, rect.key_begin, rect.key_end, runs);
    }
    return rect.rows;
  }

 private:
  const int64_t p_, lo_, hi_;
};

class BlockWindowLeaf : public MaskLeaf {
 public:
  BlockWindowLeaf(const BlockWindow& e, int64_t shift)
      : p_(e.p), lo_(e.lo), hi_(e.hi), shift_(shift) {}

  Seen Classify(const MaskRect& rect, int64_t&) const override {
    return InInterval(Block(rect.key_begin) - Block(rect.last_query()),
                      Block(rect.last_key()) - Block(rect.query), lo_, hi_);
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t block = Block(rect.query);
    AppendClipped({(block + lo_) * p_ - shift_, (block + hi_ + 1) * p_ - shift_}, rect.key_begin,
                  rect.key_end, runs);
    return (block + 1) * p_ - shift_ - rect.query;
  }
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    shape.push_back(rect.key_begin - rect.query);
    shape.push_back(FloorModulo(rect.query + shift_, p_));
    return true;
  }

 private:
  int64_t Block(int64_t at) const { return FloorDivide(at + shift_, p_); }
  const int64_t p_, lo_, hi_, shift_;
};

// Intervals are ascending and do not touch.
class GlobalLeaf : public MaskLeaf {
 public:
  explicit GlobalLeaf(const Global& e) : e_(e) {}

  Seen Classify(const MaskRect& rect, int64_t&) const override {
    const Seen rows = Lie(rect.query, rect.last_query());
    const Seen keys = Lie(rect.key_begin, rect.last_key());
    return Either(e_.direction == GlobalDirection::kColumns ? Seen::kNone : rows,
                  e_.direction == GlobalDirection::kRows ? Seen::kNone : keys);
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const size_t at = After(rect.query);
    const bool is_in = at < e_.end.size() && e_.start[at] <= rect.query;
    const bool has_rows = e_.direction != GlobalDirection::kColumns;
    if (has_rows && is_in) {
      runs.push_back({rect.key_begin, rect.key_end});
    } else if (e_.direction != GlobalDirection::kRows) {
      for (size_t n = After(rect.key_begin); n < e_.end.size() && e_.start[n] < rect.key_end; ++n) {
        AppendClipped({e_.start[n], e_.end[n]}, rect.key_begin, rect.key_end, runs);
      }
    }
    if (!has_rows || at == e_.end.size()) return rect.rows;
    return (is_in ? e_.end[at] : e_.start[at]) - rect.query;
  }
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    return AppendLine(rect.query, rect.rows, shape) &&
           AppendLine(rect.key_begin, rect.keys(), shape);
  }

 private:
  bool AppendLine(int64_t begin, int64_t count, std::vector<int64_t>& shape) const {
    shape.push_back(static_cast<int64_t>(Lie(begin, begin)));
    return AppendEdges(e_.start, begin, begin + count, shape) &&
           AppendEdges(e_.end, begin, begin + count, shape);
  }
  size_t After(int64_t at) const {  // the first interval that ends after it
    return static_cast<size_t>(std::upper_bound(e_.end.begin(), e_.end.end(), at) - e_.end.begin());
  }
  Seen Lie(int64_t first, int64_t last) const {
    const size_t n = After(first);
    return n == e_.end.size() ? Seen::kNone
                              : InInterval(first, last, e_.start[n], int64_t{e_.end[n]} - 1);
  }
  const Global& e_;
};

class SegmentLeaf : public MaskLeaf {
 public:
  explicit SegmentLeaf(const Segment& e) : cu_(e.cu) {}

  Seen Classify(const MaskRect& rect, int64_t&) const override {
    const int64_t q0 = Document(rect.query), q1 = Document(rect.last_query());
    const int64_t k0 = Document(rect.key_begin), k1 = Document(rect.last_key());
    const int64_t first = std::max(q0, k0), last = std::min(q1, k1);  // that both may lie in
    if (first > last || first >= Documents() || last < 0) return Seen::kNone;
    return q0 == q1 && k0 == k1 && Exists(q0) ? Seen::kAll : Seen::kMixed;
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t document = Document(rect.query);
    if (document < 0) return -rect.query;
    if (document >= Documents()) return rect.rows;
    const size_t n = static_cast<size_t>(document);
    AppendClipped({cu_[n], cu_[n + 1]}, rect.key_begin, rect.key_end, runs);
    return cu_[n + 1] - rect.query;
  }
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    // Not those of rectangles that reach beyond the documents.
    if (rect.query < 0 || rect.last_query() >= cu_.back() || rect.last_key() >= cu_.back()) {
      return false;
    }
    shape.push_back(Document(rect.query) - Document(rect.key_begin));
    return AppendEdges(cu_, rect.query, rect.query + rect.rows, shape) &&
           AppendEdges(cu_, rect.key_begin, rect.key_end, shape);
  }

 private:
  int64_t Documents() const { return static_cast<int64_t>(cu_.size()) - 1; }
  bool Exists(int64_t document) const { return document >= 0 && document < Documents(); }
  // −1 before the first one, Documents() after the last one.
  int64_t Document(int64_t at) const {
    return std::upper_bound(cu_.begin(), cu_.end(), at) - cu_.begin() - 1;
  }
  const std::vector<uint32_t>& cu_;
};

// Ids of one side, with the stretches of equal ones and, for rectangles, least and greatest.
class GroupSide {
 public:
  GroupSide(const uint32_t* ids, int64_t count) : ids_(ids), end_(static_cast<size_t>(count)) {
    for (int64_t n = count; n-- > 0;) {
      const bool is_last = n + 1 == count || ids[n] != ids[n + 1];
      end_[static_cast<size_t>(n)] = is_last ? n + 1 : end_[static_cast<size_t>(n + 1)];
    }
    leaves_ = 1;
    while (leaves_ < count) leaves_ *= 2;
    range_.resize(static_cast<size_t>(2 * leaves_));
    for (int64_t n = 0; n < count; ++n) {
      if (ids[n] != 0) range_[static_cast<size_t>(leaves_ + n)] = {ids[n], ids[n]};
    }
    for (int64_t n = leaves_; n-- > 1;) {
      range_[static_cast<size_t>(n)] =
          Merge(range_[static_cast<size_t>(2 * n)], range_[static_cast<size_t>(2 * n + 1)]);
    }
  }

  struct Range {  // of ids above 0; first > last: none
    uint32_t first = std::numeric_limits<uint32_t>::max(), last = 0;
  };
  uint32_t Id(int64_t at) const { return ids_[at]; }
  int64_t EqualUntil(int64_t at) const { return end_[static_cast<size_t>(at)]; }
  Range RangeOf(int64_t begin, int64_t end) const {
    Range range;
    for (begin += leaves_, end += leaves_; begin < end; begin /= 2, end /= 2) {
      if (begin % 2 == 1) range = Merge(range, range_[static_cast<size_t>(begin++)]);
      if (end % 2 == 1) range = Merge(range, range_[static_cast<size_t>(--end)]);
    }
    return range;
  }

 private:
  static Range Merge(Range a, Range b) {
    return {std::min(a.first, b.first), std::max(a.last, b.last)};
  }

  const uint32_t* ids_;
  std::vector<int64_t> end_;
  int64_t leaves_;
  std::vector<Range> range_;  // a binary tree
};

class GroupsLeaf : public MaskLeaf {
 public:
  GroupsLeaf(const Groups& e, const MaskExtents& extents, int64_t batch)
      : rows_(e.row.data() + (e.per_batch ? batch * extents.rows : 0), extents.rows),
        keys_(e.key.data() + (e.per_batch ? batch * extents.keys : 0), extents.keys) {}

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    steps += 4;
    const int64_t row_end = rect.row + rect.rows;
    const GroupSide::Range row = rows_.RangeOf(rect.row, row_end);
    const GroupSide::Range key = keys_.RangeOf(rect.key_begin, rect.key_end);
    if (row.first > row.last || key.first > key.last) return Seen::kNone;
    if (row.last < key.first || key.last < row.first) return Seen::kNone;
    const bool is_one =
        rows_.EqualUntil(rect.row) >= row_end && keys_.EqualUntil(rect.key_begin) >= rect.key_end;
    if (!is_one) return Seen::kMixed;
    return row.first == key.first ? Seen::kAll : Seen::kNone;
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const uint32_t id = rows_.Id(rect.row);
    for (int64_t key = rect.key_begin; id != 0 && key < rect.key_end;) {
      const int64_t end = keys_.EqualUntil(key);
      if (keys_.Id(key) == id) AppendClipped({key, end}, rect.key_begin, rect.key_end, runs);
      key = end;
    }
    return rows_.EqualUntil(rect.row) - rect.row;
  }

 private:
  const GroupSide rows_, keys_;
};

class PrefixLeaf : public MaskLeaf {
 public:
  explicit PrefixLeaf(int64_t length) : length_(length) {}
  Seen Classify(const MaskRect& rect, int64_t&) const override {
    return InInterval(rect.key_begin, rect.last_key(), 0, length_ - 1);
  }
  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    AppendClipped({0, length_}, rect.key_begin, rect.key_end, runs);
    return rect.rows;
  }

 private:
  const int64_t length_;
};

std::unique_ptr<MaskLeaf> MakeBand(int64_t left, int64_t right, int64_t step) {
  return std::make_unique<DiagonalLeaf>(left == -1 ? -kUnbounded : -left * step,
                                        right == -1 ? kUnbounded : right * step, step, 0);
}

}  // namespace

std::unique_ptr<MaskLeaf> MakeExprLeaf(const MaskExpr& expr, const MaskExtents& extents,
                                       int64_t batch) {
  const auto entry = [&](size_t entries) {
    return entries == 1 ? size_t{0} : static_cast<size_t>(batch);
  };
  if (auto* e = std::get_if<RelativeWindow>(&expr.op)) return MakeBand(e->left, e->right, 1);
  if (auto* e = std::get_if<Dilated>(&expr.op)) return MakeBand(e->left, e->right, e->step);
  if (auto* e = std::get_if<StrideRel>(&expr.op)) {  // Q − J = phase: J − Q = −phase
    return std::make_unique<DiagonalLeaf>(-kUnbounded, kUnbounded, e->p, -int64_t{e->phase});
  }
  if (auto* e = std::get_if<StrideCol>(&expr.op)) return std::make_unique<StrideColLeaf>(*e);
  if (auto* e = std::get_if<BlockWindow>(&expr.op)) {
    const int64_t shift = e->shift.empty() ? 0 : e->shift[entry(e->shift.size())];
    return std::make_unique<BlockWindowLeaf>(*e, shift);
  }
  if (auto* e = std::get_if<Global>(&expr.op)) return std::make_unique<GlobalLeaf>(*e);
  if (auto* e = std::get_if<Prefix>(&expr.op)) {
    return std::make_unique<PrefixLeaf>(e->len[entry(e->len.size())]);
  }
  if (auto* e = std::get_if<Segment>(&expr.op)) return std::make_unique<SegmentLeaf>(*e);
  auto* groups = std::get_if<Groups>(&expr.op);
  CHECK(groups != nullptr) << "operation " << expr.op.index();
  return std::make_unique<GroupsLeaf>(*groups, extents, batch);
}

}  // namespace attnd
