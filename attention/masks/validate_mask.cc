// Checks the values of a mask that C++ callers wrote: every refusal names the wire's field.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

// The way from problem.mask to a field, spelled only where something is wrong.
struct FieldPath {
  const FieldPath* up = nullptr;
  absl::string_view name;
  int64_t index = -1;  // −1: none
  std::string Spell() const {
    return absl::StrCat(up != nullptr ? absl::StrCat(up->Spell(), ".") : "", name,
                        index < 0 ? "" : absl::StrCat("[", index, "]"));
  }
};

template <class Expected, class Got>
absl::Status Wrong(const FieldPath& path, absl::string_view field, const Expected& expected,
                   const Got& got) {
  return absl::InvalidArgumentError(absl::StrCat(path.Spell(), field.empty() ? "" : ".", field,
                                                 ": expected ", expected, ", got ", got));
}
template <class Expected, class Got>
absl::Status WrongAt(const FieldPath& path, absl::string_view list, size_t index,
                     const Expected& expected, const Got& got) {
  return Wrong(path, absl::StrCat(list, "[", index, "]"), expected, got);
}

absl::Status InRange(const FieldPath& path, absl::string_view field, int64_t value, int64_t low,
                     int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Wrong(path, field, absl::StrCat(low, "..", high), value);
}
absl::Status AtLeast(const FieldPath& path, absl::string_view field, int64_t value, int64_t low) {
  if (value >= low) return absl::OkStatus();
  return Wrong(path, field, absl::StrCat(low, " or above"), value);
}
absl::Status HasEntries(const FieldPath& path, absl::string_view list, size_t got, int64_t expected,
                        absl::string_view why) {
  if (static_cast<int64_t>(got) == expected) return absl::OkStatus();
  return Wrong(path, list, absl::StrCat(why, " = ", expected, " entries"), got);
}
absl::Status OneOrBatch(const FieldPath& path, absl::string_view list, size_t got, int64_t batch) {
  if (got == 1 || static_cast<int64_t>(got) == batch) return absl::OkStatus();
  return Wrong(path, list, absl::StrCat("1 or batch = ", batch, " entries"), got);
}
absl::Status StartsBeforeEnd(const FieldPath& path, absl::string_view list, size_t index,
                             int64_t start, int64_t end) {
  if (start <= end) return absl::OkStatus();
  return WrongAt(path, list, index, absl::StrCat("at most its end ", end), start);
}
// From 0, never falling.
absl::Status Rises(const FieldPath& path, absl::string_view list,
                   const std::vector<uint32_t>& values) {
  if (values.empty()) return Wrong(path, list, "at least one entry", 0);
  if (values[0] != 0) return WrongAt(path, list, 0, 0, values[0]);
  for (size_t n = 1; n < values.size(); ++n) {
    if (values[n] < values[n - 1]) {
      return WrongAt(path, list, n, absl::StrCat("at least ", values[n - 1]), values[n]);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const RelativeWindow& e) {
  RETURN_IF_ERROR(AtLeast(at, "left", e.left, -1));
  return AtLeast(at, "right", e.right, -1);
}
absl::Status Check(const FieldPath& at, const Dilated& e) {
  RETURN_IF_ERROR(AtLeast(at, "step", e.step, 1));
  RETURN_IF_ERROR(AtLeast(at, "left", e.left, -1));
  return AtLeast(at, "right", e.right, -1);
}
absl::Status Check(const FieldPath& at, const StrideRel& e) {
  RETURN_IF_ERROR(AtLeast(at, "p", e.p, 1));
  return InRange(at, "phase", e.phase, 0, int64_t{e.p} - 1);
}
absl::Status Check(const FieldPath& at, const StrideCol& e) {
  RETURN_IF_ERROR(AtLeast(at, "p", e.p, 1));
  RETURN_IF_ERROR(InRange(at, "hi", e.hi, 0, e.p));
  return InRange(at, "lo", e.lo, 0, e.hi);
}
absl::Status Check(const FieldPath& at, const BlockWindow& e, int64_t batch) {
  RETURN_IF_ERROR(AtLeast(at, "p", e.p, 1));
  RETURN_IF_ERROR(AtLeast(at, "hi", e.hi, e.lo));
  return e.shift.empty() ? absl::OkStatus() : OneOrBatch(at, "shift", e.shift.size(), batch);
}
absl::Status Check(const FieldPath& at, const Global& e) {
  RETURN_IF_ERROR(InRange(at, "direction", static_cast<int64_t>(e.direction), 0, 2));
  RETURN_IF_ERROR(HasEntries(at, "end", e.end.size(), static_cast<int64_t>(e.start.size()),
                             "as many as start"));
  for (size_t n = 0; n < e.start.size(); ++n) {
    RETURN_IF_ERROR(StartsBeforeEnd(at, "start", n, e.start[n], e.end[n]));
    if (n > 0 && e.start[n] < e.end[n - 1]) {
      return WrongAt(at, "start", n, absl::StrCat("at least the end before it ", e.end[n - 1]),
                     e.start[n]);
    }
  }
  return absl::OkStatus();
}
absl::Status Check(const FieldPath& at, const Groups& e, const MaskExtents& extents) {
  const int64_t entries = e.per_batch ? extents.batch : 1;
  RETURN_IF_ERROR(HasEntries(at, "row", e.row.size(), entries * extents.rows,
                             e.per_batch ? "batch·rows" : "rows"));
  return HasEntries(at, "key", e.key.size(), entries * extents.keys,
                    e.per_batch ? "batch·keys" : "keys");
}
absl::Status Check(const FieldPath& at, const RandomBlocks& e) {
  return AtLeast(at, "block", e.block, 1);
}

absl::Status CheckIndices(const FieldPath& at, const BlockList& list, const MaskExtents& extents) {
  const int64_t columns = DivideUp(extents.keys, list.bk);
  for (size_t r = 0; r + 1 < list.indptr.size(); ++r) {
    for (size_t n = list.indptr[r]; n < list.indptr[r + 1]; ++n) {
      const int64_t low = n == list.indptr[r] ? 0 : int64_t{list.indices[n - 1]} + 1;
      if (list.indices[n] >= low && list.indices[n] < columns) continue;
      return WrongAt(at, "indices", n, absl::StrCat(low, "..", columns - 1, ", ascending"),
                     list.indices[n]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBitmaps(const FieldPath& at, const BlockList& list) {
  const int64_t partial = std::count(list.kind.begin(), list.kind.end(), 1);
  if (list.partial_expr) {
    if (!list.bitmaps.empty()) {
      return Wrong(at, "bitmaps", "none beside partial_expr", list.bitmaps.size());
    }
    if (list.bitmap_of.empty()) return absl::OkStatus();
    return Wrong(at, "bitmap_of", "none beside partial_expr", list.bitmap_of.size());
  }
  const int64_t bytes = DivideUp(int64_t{list.bq} * list.bk, 8);
  const int64_t bitmaps = static_cast<int64_t>(list.bitmaps.size()) / bytes;
  if (list.bitmap_of.empty()) {
    if (static_cast<int64_t>(list.bitmaps.size()) == partial * bytes) return absl::OkStatus();
    return Wrong(at, "bitmaps",
                 absl::StrCat(partial, " partial blocks · ", bytes, " bytes, or partial_expr"),
                 absl::StrCat(list.bitmaps.size(), " bytes"));
  }
  if (static_cast<int64_t>(list.bitmaps.size()) != bitmaps * bytes) {
    return Wrong(at, "bitmaps", absl::StrCat("a multiple of ", bytes, " bytes"),
                 absl::StrCat(list.bitmaps.size(), " bytes"));
  }
  RETURN_IF_ERROR(
      HasEntries(at, "bitmap_of", list.bitmap_of.size(), partial, "the number of partial blocks"));
  for (size_t n = 0; n < list.bitmap_of.size(); ++n) {
    if (list.bitmap_of[n] >= bitmaps) {
      return WrongAt(at, "bitmap_of", n, absl::StrCat("below the number of bitmaps ", bitmaps),
                     list.bitmap_of[n]);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const BlockList& list, const MaskExtents& extents) {
  RETURN_IF_ERROR(InRange(at, "bq", list.bq, 1, kMaxMaskLength));
  RETURN_IF_ERROR(InRange(at, "bk", list.bk, 1, kMaxMaskLength));
  RETURN_IF_ERROR(HasEntries(at, "indptr", list.indptr.size(), DivideUp(extents.rows, list.bq) + 1,
                             "⌈rows / bq⌉ + 1"));
  RETURN_IF_ERROR(Rises(at, "indptr", list.indptr));
  if (list.indptr.back() != list.indices.size()) {
    return WrongAt(at, "indptr", list.indptr.size() - 1,
                   absl::StrCat("the number of indices ", list.indices.size()), list.indptr.back());
  }
  RETURN_IF_ERROR(CheckIndices(at, list, extents));
  if (!list.kind.empty()) {
    RETURN_IF_ERROR(HasEntries(at, "kind", list.kind.size(),
                               static_cast<int64_t>(list.indices.size()), "none, or indices"));
  }
  for (size_t n = 0; n < list.kind.size(); ++n) {
    if (list.kind[n] > 1) return WrongAt(at, "kind", n, "0 or 1", static_cast<int>(list.kind[n]));
  }
  RETURN_IF_ERROR(InRange(at, "order", static_cast<int64_t>(list.order), 0, 1));
  if (list.order == BitOrder::kTile8ColumnMajor && (list.bq % 8 != 0 || list.bk % 8 != 0)) {
    return Wrong(at, list.bq % 8 != 0 ? "bq" : "bk",
                 "a multiple of 8 for BIT_ORDER_TILE8_COLUMN_MAJOR",
                 list.bq % 8 != 0 ? list.bq : list.bk);
  }
  return CheckBitmaps(at, list);
}

absl::Status Check(const FieldPath& at, const ColRuns& runs, const MaskExtents& extents) {
  RETURN_IF_ERROR(HasEntries(at, "start", runs.start.size(), extents.keys * runs.m, "keys·m"));
  RETURN_IF_ERROR(HasEntries(at, "end", runs.end.size(), extents.keys * runs.m, "keys·m"));
  for (size_t n = 0; n < runs.start.size(); ++n) {
    RETURN_IF_ERROR(StartsBeforeEnd(at, "start", n, runs.start[n], runs.end[n]));
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const RowRuns& runs, const MaskExtents& extents) {
  const int64_t entries = extents.rows * runs.r;
  RETURN_IF_ERROR(HasEntries(at, "first", runs.first.size(), entries, "rows·r"));
  RETURN_IF_ERROR(HasEntries(at, "stride", runs.stride.size(), entries, "rows·r"));
  RETURN_IF_ERROR(HasEntries(at, "count", runs.count.size(), entries, "rows·r"));
  for (size_t n = 0; n < runs.first.size(); ++n) {
    if (runs.count[n] == 0) continue;
    if (runs.stride[n] == 0 && runs.count[n] > 1) {
      return WrongAt(at, "stride", n, "1 or above where count is above 1", 0);
    }
    const uint64_t last = runs.first[n] + uint64_t{runs.stride[n]} * (runs.count[n] - 1);
    if (last >= static_cast<uint64_t>(extents.keys)) {
      return WrongAt(at, "count", n,
                     absl::StrCat("first + stride·(count − 1) below keys = ", extents.keys), last);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const RowIntervals& runs, const MaskExtents& extents) {
  const int64_t entries = extents.rows * runs.r;
  RETURN_IF_ERROR(HasEntries(at, "begin", runs.begin.size(), entries, "rows·r"));
  RETURN_IF_ERROR(HasEntries(at, "end", runs.end.size(), entries, "rows·r"));
  int64_t before = 0;  // end of the row's last run that is not empty
  for (size_t n = 0; n < runs.begin.size(); ++n) {
    if (n % runs.r == 0) before = 0;
    RETURN_IF_ERROR(StartsBeforeEnd(at, "begin", n, runs.begin[n], runs.end[n]));
    if (runs.begin[n] == runs.end[n]) continue;
    if (runs.begin[n] < before) {
      return WrongAt(at, "begin", n, absl::StrCat("at least the end before it ", before),
                     runs.begin[n]);
    }
    before = runs.end[n];
    if (before > extents.keys) {
      return WrongAt(at, "end", n, absl::StrCat("at most keys = ", extents.keys), before);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const Rectangles& rectangles, const MaskExtents& extents) {
  const int64_t count = static_cast<int64_t>(rectangles.of.size());
  if (count > kMaxMaskRectangles) {
    return Wrong(at, "of", absl::StrCat("at most ", kMaxMaskRectangles, " rectangles"), count);
  }
  for (int64_t n = 0; n < count; ++n) {
    const MaskRectangle& r = rectangles.of[static_cast<size_t>(n)];
    const FieldPath one = {&at, "of", n};
    RETURN_IF_ERROR(InRange(one, "row_end", r.row_end, 0, extents.rows));
    RETURN_IF_ERROR(InRange(one, "row_begin", r.row_begin, 0, r.row_end));
    RETURN_IF_ERROR(InRange(one, "key_end", r.key_end, 0, extents.keys));
    RETURN_IF_ERROR(InRange(one, "key_begin", r.key_begin, 0, r.key_end));
    RETURN_IF_ERROR(InRange(one, "shape", static_cast<int64_t>(r.shape), 0, 3));
  }
  return absl::OkStatus();
}

absl::Status Check(const FieldPath& at, const MaskBitmap& bits, const MaskExtents& extents) {
  RETURN_IF_ERROR(AtLeast(at, "row_pitch_bits", bits.row_pitch_bits, extents.keys));
  const int64_t bytes = DivideUp(extents.rows * bits.row_pitch_bits, 8);
  if (static_cast<int64_t>(bits.data.size()) == bytes) return absl::OkStatus();
  return Wrong(at, "data", absl::StrCat("⌈rows·row_pitch_bits / 8⌉ = ", bytes, " bytes"),
               absl::StrCat(bits.data.size(), " bytes"));
}

// Walks the patterns in order, and knows the size of each with what it refers to.
class PatternChecker {
 public:
  explicit PatternChecker(const MaskExtents& extents) : extents_(extents) {}

  absl::Status CheckPattern(int64_t index, const MaskPattern& pattern) {
    const FieldPath mask = {nullptr, "problem.mask"}, at = {&mask, "pattern", index};
    size_ = Size{};
    if (pattern.index() == 0) {
      return Wrong(at, "",
                   "one of expr, blocks, col_runs, row_runs, bits, row_intervals, rectangles",
                   "none");
    }
    RETURN_IF_ERROR(Grow(at, 1, 0));
    RETURN_IF_ERROR(CheckKind(at, pattern));
    sizes_.push_back(size_);
    return absl::OkStatus();
  }

 private:
  struct Size {
    int64_t nodes = 0, depth = 0;  // with what pattern_ref repeats
  };

  absl::Status CheckKind(const FieldPath& at, const MaskPattern& pattern) {
    if (auto* expr = std::get_if<MaskExpr>(&pattern)) return CheckExpr({&at, "expr"}, *expr, 1);
    if (auto* blocks = std::get_if<BlockList>(&pattern)) {
      const FieldPath here = {&at, "blocks"};
      RETURN_IF_ERROR(Check(here, *blocks, extents_));
      if (!blocks->partial_expr) return absl::OkStatus();
      return CheckExpr({&here, "partial_expr"}, *blocks->partial_expr, 2);
    }
    if (auto* runs = std::get_if<ColRuns>(&pattern)) {
      const FieldPath here = {&at, "col_runs"};
      RETURN_IF_ERROR(Check(here, *runs, extents_));
      return runs->base ? CheckExpr({&here, "base"}, *runs->base, 2) : absl::OkStatus();
    }
    if (auto* runs = std::get_if<RowRuns>(&pattern)) {
      return Check({&at, "row_runs"}, *runs, extents_);
    }
    if (auto* runs = std::get_if<RowIntervals>(&pattern)) {
      return Check({&at, "row_intervals"}, *runs, extents_);
    }
    if (auto* rectangles = std::get_if<Rectangles>(&pattern)) {
      return Check({&at, "rectangles"}, *rectangles, extents_);
    }
    return Check({&at, "bits"}, std::get<MaskBitmap>(pattern), extents_);
  }

  // `nodes` more, the deepest of them at `depth`.
  absl::Status Grow(const FieldPath& at, int64_t nodes, int64_t depth) {
    size_.nodes += nodes;
    size_.depth = std::max(size_.depth, depth);
    if (size_.depth > kMaxMaskDepth) {
      return Wrong(at, "", absl::StrCat("a depth of at most ", kMaxMaskDepth), depth);
    }
    if (size_.nodes > kMaxMaskNodes) {
      return Wrong(
          at, "",
          absl::StrCat("at most ", kMaxMaskNodes, " nodes in a pattern with what it refers to"),
          "more");
    }
    return absl::OkStatus();
  }

  absl::Status CheckExpr(const FieldPath& at, const MaskExpr& expr, int64_t depth) {
    RETURN_IF_ERROR(Grow(at, 1, depth));
    if (++nodes_ > kMaxMaskNodes) {
      return Wrong(at, "", absl::StrCat("at most ", kMaxMaskNodes, " nodes in all patterns"),
                   "more");
    }
    switch (expr.op.index()) {
      case 0:
        return Wrong(at, "", "an operation", "none");
      case kIndexOf<AllOf>:
        return CheckOperands({&at, "all_of"}, expr, depth);
      case kIndexOf<AnyOf>:
        return CheckOperands({&at, "any_of"}, expr, depth);
      case kIndexOf<Negate>:
        if (expr.of.size() != 1) return Wrong(at, "negate", "one operand", expr.of.size());
        return CheckExpr({&at, "negate"}, expr.of[0], depth + 1);
      case kIndexOf<RandomBlocks>: {
        const FieldPath here = {&at, "random"};
        RETURN_IF_ERROR(Check(here, std::get<RandomBlocks>(expr.op)));
        if (expr.of.size() > 1) return Wrong(here, "exclude", "at most one", expr.of.size());
        return expr.of.empty() ? absl::OkStatus()
                               : CheckExpr({&here, "exclude"}, expr.of[0], depth + 1);
      }
      default:
        if (!expr.of.empty()) return Wrong(at, "", "no operands", expr.of.size());
        return CheckLeaf(at, expr, depth);
    }
  }

  absl::Status CheckOperands(const FieldPath& at, const MaskExpr& expr, int64_t depth) {
    for (size_t n = 0; n < expr.of.size(); ++n) {
      RETURN_IF_ERROR(CheckExpr({&at, "e", static_cast<int64_t>(n)}, expr.of[n], depth + 1));
    }
    return absl::OkStatus();
  }

  absl::Status CheckLeaf(const FieldPath& at, const MaskExpr& expr, int64_t depth) {
    if (auto* e = std::get_if<RelativeWindow>(&expr.op)) return Check({&at, "window"}, *e);
    if (auto* e = std::get_if<Dilated>(&expr.op)) return Check({&at, "dilated"}, *e);
    if (auto* e = std::get_if<StrideRel>(&expr.op)) return Check({&at, "stride_rel"}, *e);
    if (auto* e = std::get_if<StrideCol>(&expr.op)) return Check({&at, "stride_col"}, *e);
    if (auto* e = std::get_if<BlockWindow>(&expr.op)) {
      return Check({&at, "block_window"}, *e, extents_.batch);
    }
    if (auto* e = std::get_if<Global>(&expr.op)) return Check({&at, "global"}, *e);
    if (auto* e = std::get_if<Prefix>(&expr.op)) {
      return OneOrBatch({&at, "prefix"}, "len", e->len.size(), extents_.batch);
    }
    if (auto* e = std::get_if<Segment>(&expr.op)) return Rises({&at, "segment"}, "cu", e->cu);
    if (auto* e = std::get_if<Groups>(&expr.op)) return Check({&at, "groups"}, *e, extents_);
    if (auto* e = std::get_if<PatternRef>(&expr.op)) {
      const int64_t own = static_cast<int64_t>(sizes_.size());
      if (e->pattern >= own) {
        return Wrong(at, "pattern_ref", absl::StrCat("an earlier pattern, below ", own),
                     e->pattern);
      }
      const Size& size = sizes_[e->pattern];
      return Grow({&at, "pattern_ref"}, size.nodes, depth + size.depth);
    }
    return absl::OkStatus();  // AllKeys
  }

  template <class Op>
  static constexpr size_t kIndexOf = MaskExpr{Op{}, {}}.op.index();

  const MaskExtents& extents_;
  std::vector<Size> sizes_;  // of the patterns so far
  Size size_;                // of this one
  int64_t nodes_ = 0;        // of all, without what pattern_ref repeats
};

absl::Status CheckPatternOf(const MaskSpec& spec, const MaskExtents& extents) {
  const FieldPath mask = {nullptr, "problem.mask"};
  const int64_t heads = extents.q_heads, both = extents.batch * heads;
  const int64_t entries = static_cast<int64_t>(spec.pattern_of.size());
  if (entries != 1 && entries != heads && entries != both) {
    return Wrong(mask, "pattern_of",
                 absl::StrCat("1, q_heads = ", heads, " or batch·q_heads = ", both, " entries"),
                 entries);
  }
  for (size_t n = 0; n < spec.pattern_of.size(); ++n) {
    if (spec.pattern_of[n] >= spec.pattern.size()) {
      return WrongAt(mask, "pattern_of", n,
                     absl::StrCat("below the number of patterns ", spec.pattern.size()),
                     spec.pattern_of[n]);
    }
  }
  return absl::OkStatus();
}

absl::Status Inside(absl::string_view origin_field, int64_t begin, absl::string_view extents_field,
                    int64_t size, int64_t whole) {
  const FieldPath mask = {nullptr, "problem.mask"};
  const FieldPath origin = {&mask, "origin"}, extents = {&mask, "extents"};
  RETURN_IF_ERROR(InRange(origin, origin_field, begin, 0, kMaxMaskLength));
  if (whole == 0 || begin + size <= whole) return absl::OkStatus();
  return Wrong(extents, extents_field,
               absl::StrCat("at least origin + the problem's = ", begin + size), whole);
}

}  // namespace

MaskExtents ResolvedExtents(const MaskSpec& spec, const MaskCall& call) {
  const auto end = [](int64_t begin, int64_t count) {
    return std::clamp<int64_t>(begin, 0, kMaxMaskLength) + count;
  };
  MaskExtents extents = spec.extents;
  if (extents.batch == 0) extents.batch = end(spec.origin.batch_begin, call.batch);
  if (extents.q_heads == 0) extents.q_heads = end(spec.origin.head_begin, call.q_heads);
  if (extents.rows == 0) extents.rows = call.rows;
  if (extents.keys == 0) extents.keys = call.keys;
  return extents;
}

absl::Status ValidatePlace(const MaskSpec& mask, const MaskOrigin& origin, const MaskCall& call) {
  const MaskExtents& whole = mask.extents;
  RETURN_IF_ERROR(Inside("batch_begin", origin.batch_begin, "batch", call.batch, whole.batch));
  RETURN_IF_ERROR(Inside("head_begin", origin.head_begin, "q_heads", call.q_heads, whole.q_heads));
  RETURN_IF_ERROR(Inside("row_begin", origin.row_begin, "rows", call.rows, whole.rows));
  return Inside("key_begin", origin.key_begin, "keys", call.keys, whole.keys);
}

absl::Status ValidateMask(const MaskSpec& spec, const MaskCall& call) {
  const FieldPath mask = {nullptr, "problem.mask"}, at = {&mask, "extents"};
  RETURN_IF_ERROR(InRange(at, "batch", spec.extents.batch, 0, kMaxMaskBatch));
  RETURN_IF_ERROR(InRange(at, "q_heads", spec.extents.q_heads, 0, kMaxMaskHeads));
  RETURN_IF_ERROR(InRange(at, "rows", spec.extents.rows, 0, kMaxMaskLength));
  RETURN_IF_ERROR(InRange(at, "keys", spec.extents.keys, 0, kMaxMaskLength));
  const MaskExtents extents = ResolvedExtents(spec, call);
  MaskSpec resolved;
  resolved.extents = extents;
  RETURN_IF_ERROR(ValidatePlace(resolved, spec.origin, call));
  const int64_t patterns = static_cast<int64_t>(spec.pattern.size());
  if (patterns < 1 || patterns > kMaxMaskPatterns) {
    return Wrong(mask, "pattern", absl::StrCat("1..", kMaxMaskPatterns, " patterns"), patterns);
  }
  RETURN_IF_ERROR(CheckPatternOf(spec, extents));
  RETURN_IF_ERROR(InRange(mask, "empty_row", static_cast<int64_t>(spec.empty_row), 0, 1));
  PatternChecker checker(extents);
  for (int64_t n = 0; n < patterns; ++n) {
    RETURN_IF_ERROR(checker.CheckPattern(n, spec.pattern[static_cast<size_t>(n)]));
  }
  return absl::OkStatus();
}

}  // namespace attnd
