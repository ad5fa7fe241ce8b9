#include "attention/masks/random_mask.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace attnd {
namespace {

using Integers = std::vector<uint32_t>;

class Maker {
 public:
  Maker(const std::function<int64_t(int64_t, int64_t)>& choose, const MaskExtents& extents)
      : choose_(choose), extents_(extents) {}

  MaskPattern Pattern(int64_t earlier) {
    earlier_ = earlier;
    nodes_left_ = 12;
    switch (Choose(0, 13)) {
      case 0:
        return Blocks();
      case 1:
        return Columns();
      case 2:
        return Progressions();
      case 3:
        return Intervals();
      case 4:
        return SomeRectangles();
      case 5:
        return Bits();
      default:
        return Expr(static_cast<int>(Choose(1, 4)));
    }
  }

 private:
  int64_t Choose(int64_t low, int64_t high) { return choose_(low, high); }
  bool Maybe(int64_t one_in) { return Choose(1, one_in) == 1; }
  uint32_t Number(int64_t low, int64_t high) { return static_cast<uint32_t>(Choose(low, high)); }
  int32_t Signed(int64_t low, int64_t high) { return static_cast<int32_t>(Choose(low, high)); }
  int64_t Longest() const { return std::max(extents_.rows, extents_.keys); }
  // −1, a little, or nearly all.
  int32_t Bound() { return Maybe(4) ? -1 : Signed(0, Maybe(2) ? 4 : Longest() + 2); }
  uint32_t Period() { return Number(1, Maybe(2) ? 4 : Longest() + 3); }
  Integers Rising(int64_t most_entries, int64_t most) {
    Integers values(static_cast<size_t>(Choose(0, most_entries)));
    for (uint32_t& value : values) value = Number(0, most);
    std::sort(values.begin(), values.end());
    return values;
  }

  MaskExpr Expr(int depth) {
    const int64_t kind = Choose(0, depth > 1 && nodes_left_ > 0 ? 18 : 11);
    --nodes_left_;
    if (kind <= 11) return Leaf(kind, depth);
    MaskExpr expr;
    if (kind >= 17) return {Negate{}, {Expr(depth - 1)}};
    kind % 2 == 0 ? static_cast<void>(expr.op = AllOf{}) : static_cast<void>(expr.op = AnyOf{});
    for (int64_t n = Choose(0, 3); n > 0; --n) expr.of.push_back(Expr(depth - 1));
    return expr;
  }

  MaskExpr Leaf(int64_t kind, int depth) {
    switch (kind) {
      case 0:
        return {AllKeys{}, {}};
      case 1:
        return {Dilated{Period(), Bound(), Bound()}, {}};
      case 2: {
        const uint32_t p = Period();
        return {StrideRel{p, Number(0, int64_t{p} - 1)}, {}};
      }
      case 3: {
        const uint32_t p = Period(), hi = Number(0, p);
        return {StrideCol{p, Number(0, hi), hi}, {}};
      }
      case 4:
        return {BlockWindowOf(), {}};
      case 5:
        return {GlobalOf(), {}};
      case 6: {
        Prefix prefix = {Integers(static_cast<size_t>(Maybe(2) ? 1 : extents_.batch))};
        for (uint32_t& len : prefix.len) len = Number(0, extents_.keys + 1);
        return {prefix, {}};
      }
      case 7: {
        Segment segment = {Rising(5, Longest() + 2)};
        segment.cu.insert(segment.cu.begin(), 0);
        return {segment, {}};
      }
      case 8:
        return {GroupsOf(), {}};
      case 9:
        return Random(depth);
      case 10:
        if (earlier_ > 0) return {PatternRef{Number(0, earlier_ - 1)}, {}};
        [[fallthrough]];
      default:
        return {RelativeWindow{Bound(), Bound()}, {}};
    }
  }

  BlockWindow BlockWindowOf() {
    BlockWindow window = {.p = Period(), .lo = Signed(-4, 4)};
    window.hi = Signed(window.lo, window.lo + 4);
    if (Maybe(2)) window.shift.resize(static_cast<size_t>(Maybe(2) ? 1 : extents_.batch));
    for (int32_t& shift : window.shift) shift = Signed(-20, 20);
    return window;
  }

  Global GlobalOf() {
    Integers ends = Rising(6, Longest() + 2);
    if (ends.size() % 2 == 1) ends.pop_back();
    Global global = {.direction = static_cast<GlobalDirection>(Choose(0, 2))};
    for (size_t n = 0; n < ends.size(); n += 2) {
      global.start.push_back(ends[n]);
      global.end.push_back(ends[n + 1]);
    }
    return global;
  }

  Groups GroupsOf() {
    Groups groups = {.per_batch = Maybe(3)};
    const int64_t entries = groups.per_batch ? extents_.batch : 1, most = Choose(1, 4);
    const auto fill = [&](Integers& ids, int64_t count) {
      uint32_t id = 0;
      for (int64_t n = 0; n < entries * count; ++n) {
        if (n == 0 || Maybe(4)) id = Number(0, most);
        ids.push_back(id);
      }
    };
    fill(groups.row, extents_.rows);
    fill(groups.key, extents_.keys);
    return groups;
  }

  MaskExpr Random(int depth) {
    RandomBlocks random = {.block = Number(1, 12), .per_row = Number(0, 5)};
    random.seed = static_cast<uint64_t>(Choose(0, INT64_MAX));
    random.per_head = Maybe(2);
    MaskExpr expr = {random, {}};
    if (depth > 1 && Maybe(2)) expr.of.push_back(Expr(depth - 1));
    return expr;
  }

  std::vector<uint8_t> Bytes(int64_t count) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count));
    const int64_t style = Choose(0, 3);  // nothing, all, random
    for (uint8_t& byte : bytes) {
      byte = style == 0 ? 0 : style == 1 ? 0xff : static_cast<uint8_t>(Choose(0, 255));
    }
    return bytes;
  }

  MaskPattern Blocks() {
    BlockList list = {.bq = Number(1, 20), .bk = Number(1, 20)};
    if (Maybe(3)) {
      list.order = BitOrder::kTile8ColumnMajor;
      list.bq = 8 * Number(1, 3);
      list.bk = 8 * Number(1, 3);
    }
    const int64_t rows = (extents_.rows + list.bq - 1) / list.bq;
    const int64_t columns = (extents_.keys + list.bk - 1) / list.bk;
    const int64_t density = Choose(1, 4), partial = Choose(0, 3);
    int64_t partial_blocks = 0;
    list.indptr.push_back(0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        if (!Maybe(density)) continue;
        list.indices.push_back(static_cast<uint32_t>(column));
        list.kind.push_back(partial > 0 && Maybe(partial) ? 1 : 0);
        partial_blocks += list.kind.back();
      }
      list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
    }
    if (partial_blocks == 0) list.kind.clear();
    PartialBlocks(list, partial_blocks);
    return list;
  }

  void PartialBlocks(BlockList& list, int64_t count) {
    const int64_t bytes = (int64_t{list.bq} * list.bk + 7) / 8;
    if (Maybe(3)) {
      list.partial_expr = Expr(2);
    } else if (count > 0 && Maybe(2)) {
      const int64_t bitmaps = Choose(1, 3);
      for (int64_t n = 0; n < bitmaps; ++n) {
        const std::vector<uint8_t> more = Bytes(bytes);
        list.bitmaps.insert(list.bitmaps.end(), more.begin(), more.end());
      }
      for (int64_t n = 0; n < count; ++n) list.bitmap_of.push_back(Number(0, bitmaps - 1));
    } else {
      list.bitmaps = Bytes(count * bytes);
    }
  }

  MaskPattern Columns() {
    ColRuns runs = {.m = Number(0, 3)};
    for (int64_t n = 0; n < extents_.keys * runs.m; ++n) {
      const uint32_t end = Number(0, extents_.rows + 1);
      runs.start.push_back(Number(0, end));
      runs.end.push_back(end);
    }
    if (Maybe(2)) runs.base = Expr(2);
    return runs;
  }

  MaskPattern Progressions() {
    RowRuns runs = {.r = Number(0, 3)};
    for (int64_t n = 0; n < extents_.rows * runs.r; ++n) {
      const int64_t first = Choose(0, extents_.keys - 1), stride = Choose(1, 5);
      const int64_t most = (extents_.keys - 1 - first) / stride + 1;
      runs.first.push_back(static_cast<uint32_t>(first));
      runs.stride.push_back(static_cast<uint32_t>(stride));
      runs.count.push_back(Number(0, most));
    }
    return runs;
  }

  MaskPattern Intervals() {
    RowIntervals runs = {.r = Number(0, 3)};
    for (int64_t row = 0; row < extents_.rows; ++row) {
      Integers ends;
      for (uint32_t n = 0; n < 2 * runs.r; ++n) ends.push_back(Number(0, extents_.keys));
      std::sort(ends.begin(), ends.end());
      for (uint32_t n = 0; n < runs.r; ++n) {
        runs.begin.push_back(ends[2 * n]);
        runs.end.push_back(ends[2 * n + 1]);
      }
    }
    return runs;
  }

  MaskPattern SomeRectangles() {
    Rectangles rectangles;
    for (int64_t n = Choose(0, 6); n > 0; --n) {
      MaskRectangle r = {.row_end = Number(0, extents_.rows), .key_end = Number(0, extents_.keys)};
      r.row_begin = Number(0, r.row_end);
      r.key_begin = Number(0, r.key_end);
      r.shape = static_cast<RectangleShape>(Choose(0, 3));
      rectangles.of.push_back(r);
    }
    return rectangles;
  }

  MaskPattern Bits() {
    MaskBitmap bits = {.row_pitch_bits = Number(extents_.keys, extents_.keys + 9)};
    bits.data = Bytes((extents_.rows * bits.row_pitch_bits + 7) / 8);
    return bits;
  }

  const std::function<int64_t(int64_t, int64_t)>& choose_;
  const MaskExtents& extents_;
  int64_t earlier_ = 0, nodes_left_ = 0;
};

using Choose = std::function<int64_t(int64_t, int64_t)>;

// Mostly the call is the whole mask. Gives the whole's extents.
MaskExtents ChoosePlace(const Choose& choose, const MaskCall& call, MaskSpec& spec) {
  MaskExtents extents = {call.batch, call.q_heads, call.rows, call.keys};
  if (choose(0, 2) != 0) return extents;
  spec.origin = {choose(0, 20), choose(0, 20), choose(0, 2), choose(0, 2)};
  extents.batch += spec.origin.batch_begin + choose(0, 1);
  extents.q_heads += spec.origin.head_begin + choose(0, 1);
  extents.rows += spec.origin.row_begin + choose(0, 9);
  extents.keys += spec.origin.key_begin + choose(0, 9);
  spec.extents = extents;
  return extents;
}

void ChoosePatterns(const Choose& choose, const MaskExtents& extents, MaskSpec& spec) {
  Maker maker(choose, extents);
  const int64_t patterns = choose(1, 4);
  for (int64_t n = 0; n < patterns; ++n) spec.pattern.push_back(maker.Pattern(n));
  const int64_t heads = choose(0, 2);
  spec.pattern_of.resize(static_cast<size_t>(heads == 0   ? 1
                                             : heads == 1 ? extents.q_heads
                                                          : extents.batch * extents.q_heads));
  for (uint32_t& n : spec.pattern_of) n = static_cast<uint32_t>(choose(0, patterns - 1));
  spec.empty_row = static_cast<EmptyRow>(choose(0, 1));
}

}  // namespace

RandomMaskCase RandomMask(const std::function<int64_t(int64_t, int64_t)>& choose,
                          int64_t max_length, int64_t max_scores) {
  MaskSpec spec;
  MaskCall call;
  call.batch = choose(1, 3);
  call.q_heads = choose(1, 3);
  call.rows = choose(1, max_length);
  const int64_t most_keys = max_scores / (call.batch * call.q_heads * call.rows);
  call.keys = std::clamp<int64_t>(choose(1, max_length), 1, std::max<int64_t>(1, most_keys));
  const MaskExtents extents = ChoosePlace(choose, call, spec);
  const int64_t diagonal = choose(0, 3);  // none, one, or one for each entry
  if (diagonal > 0) {
    call.offsets.assign(static_cast<size_t>(diagonal == 1 ? call.batch : 1), 0);
    for (int64_t& offset : call.offsets) offset = choose(-50, 50);
  }
  ChoosePatterns(choose, extents, spec);
  return {std::move(spec), std::move(call)};
}

MaskSpec RandomMaskFor(const std::function<int64_t(int64_t, int64_t)>& choose,
                       const MaskCall& call) {
  MaskSpec spec;
  const MaskExtents extents = ChoosePlace(choose, call, spec);
  ChoosePatterns(choose, extents, spec);
  return spec;
}

}  // namespace attnd
