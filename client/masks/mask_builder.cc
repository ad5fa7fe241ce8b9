#include "client/masks/mask_builder.h"

#include <algorithm>
#include <utility>

#include "attention/masks/mask_description.h"
#include "attention/masks/mask_nodes.h"
#include "base/status_macros.h"

namespace attnd::masks {
namespace {

// Where `pattern` stands in `patterns`, at the end if it is not there.
uint32_t IndexIn(std::vector<MaskPattern>& patterns, const MaskPattern& pattern) {
  const auto found = std::find(patterns.begin(), patterns.end(), pattern);
  const auto index = static_cast<uint32_t>(found - patterns.begin());
  if (found == patterns.end()) patterns.push_back(pattern);
  return index;
}

// `expr`, whose PatternRefs count `lists`, so that they count `patterns`.
MaskExpr Moved(MaskExpr expr, const std::vector<MaskPattern>& lists,
               std::vector<MaskPattern>& patterns) {
  std::vector<uint32_t> moved;
  for (const MaskPattern& list : lists) moved.push_back(IndexIn(patterns, list));
  VisitNodes(expr, [&](MaskExpr& node) {
    if (auto* ref = std::get_if<PatternRef>(&node.op)) ref->pattern = moved[ref->pattern];
  });
  return expr;
}

Mask Leaf(MaskExpr expr) { return Mask(MaskPattern(std::move(expr))); }

template <class Item>
uint32_t Longest(const std::vector<std::vector<Item>>& lists) {
  size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list.size());
  return static_cast<uint32_t>(longest);
}

}  // namespace

Mask::Mask(MaskPattern pattern) {
  if (auto* expr = std::get_if<MaskExpr>(&pattern)) {
    expr_ = std::move(*expr);
  } else {
    lists_.push_back(std::move(pattern));
    expr_.op = PatternRef{0};
  }
}

Mask::Mask(const ::attnd::RandomBlocks& random, Mask exclude) : lists_(std::move(exclude.lists_)) {
  expr_.op = random;
  expr_.of.push_back(std::move(exclude.expr_));
}

// Operands that are the same operation join it, so that a long chain is no deep tree.
template <class Operation>
Mask Mask::Join(Mask a, Mask b) {
  b.expr_ = Moved(std::move(b.expr_), b.lists_, a.lists_);
  MaskExpr joined{Operation{}, {}};
  for (MaskExpr* side : {&a.expr_, &b.expr_}) {
    if (!std::holds_alternative<Operation>(side->op)) {
      joined.of.push_back(std::move(*side));
      continue;
    }
    for (MaskExpr& operand : side->of) joined.of.push_back(std::move(operand));
  }
  a.expr_ = std::move(joined);
  return a;
}

Mask operator&(const Mask& a, const Mask& b) { return Mask::Join<AllOf>(a, b); }
Mask operator|(const Mask& a, const Mask& b) { return Mask::Join<AnyOf>(a, b); }
Mask operator~(Mask a) {
  MaskExpr negated{Negate{}, {}};
  negated.of.push_back(std::move(a.expr_));
  a.expr_ = std::move(negated);
  return a;
}

uint32_t Mask::AddTo(std::vector<MaskPattern>& patterns) const {
  MaskExpr expr = Moved(expr_, lists_, patterns);
  if (const auto* list = std::get_if<PatternRef>(&expr.op)) return list->pattern;
  return IndexIn(patterns, MaskPattern(std::move(expr)));
}

MaskSpec Mask::Spec(EmptyRow empty_row) const { return PerHead({*this}, empty_row); }

MaskSpec PerHead(const std::vector<Mask>& masks, EmptyRow empty_row) {
  MaskSpec spec;
  spec.empty_row = empty_row;
  for (const Mask& mask : masks) spec.pattern_of.push_back(mask.AddTo(spec.pattern));
  return spec;
}

absl::Status SetMask(const MaskSpec& spec, Problem& problem) {
  ASSIGN_OR_RETURN(problem.mask, MaskDescription::Make(spec, MaskCallOf(problem)));
  problem.mask_origin = spec.origin;
  return absl::OkStatus();
}

Mask All() { return Leaf({AllKeys{}, {}}); }
Mask Nothing() { return Leaf({AnyOf{}, {}}); }
Mask Causal() { return Window(-1, 0); }
Mask Window(int32_t left, int32_t right) { return Leaf({RelativeWindow{left, right}, {}}); }
Mask Dilated(uint32_t step, int32_t left, int32_t right) {
  return Leaf({::attnd::Dilated{step, left, right}, {}});
}
Mask Stride(uint32_t p, uint32_t phase) { return Leaf({StrideRel{p, phase}, {}}); }
Mask StrideColumns(uint32_t p, uint32_t lo, uint32_t hi) {
  return Leaf({StrideCol{p, lo, hi}, {}});
}
Mask BlockWindow(uint32_t p, int32_t lo, int32_t hi, std::vector<int32_t> shift) {
  return Leaf({::attnd::BlockWindow{p, lo, hi, std::move(shift)}, {}});
}

Mask Global(const std::vector<Interval>& tokens, GlobalDirection direction) {
  ::attnd::Global global{.direction = direction};
  for (const Interval& interval : tokens) {
    global.start.push_back(interval.begin);
    global.end.push_back(interval.end);
  }
  return Leaf({std::move(global), {}});
}

Mask Prefix(std::vector<uint32_t> len) { return Leaf({::attnd::Prefix{std::move(len)}, {}}); }
Mask Documents(std::vector<uint32_t> cu_seqlens) {
  return Leaf({Segment{std::move(cu_seqlens)}, {}});
}

Mask RandomBlocks(uint32_t block, uint32_t per_row, uint64_t seed, bool per_head,
                  const std::optional<Mask>& exclude) {
  const ::attnd::RandomBlocks random{block, per_row, seed, per_head};
  return exclude.has_value() ? Mask(random, *exclude) : Leaf({random, {}});
}

Mask Groups(std::vector<uint32_t> row, std::vector<uint32_t> key, bool per_batch) {
  return Leaf({::attnd::Groups{std::move(row), std::move(key), per_batch}, {}});
}

Mask Blocks(const std::vector<std::vector<bool>>& layout, uint32_t bq, uint32_t bk) {
  BlockList list{.bq = bq, .bk = bk, .indptr = {0}};
  for (const std::vector<bool>& row : layout) {
    for (size_t column = 0; column < row.size(); ++column) {
      if (row[column]) list.indices.push_back(static_cast<uint32_t>(column));
    }
    list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
  }
  return Mask(MaskPattern(std::move(list)));
}

Mask Intervals(const std::vector<std::vector<Interval>>& of_row) {
  RowIntervals runs{.r = Longest(of_row)};
  for (const std::vector<Interval>& row : of_row) {
    for (size_t n = 0; n < runs.r; ++n) {
      const Interval interval = n < row.size() ? row[n] : Interval{};
      runs.begin.push_back(interval.begin);
      runs.end.push_back(interval.end);
    }
  }
  return Mask(MaskPattern(std::move(runs)));
}

Mask HiddenRows(const std::vector<std::vector<Interval>>& of_key) {
  ColRuns runs{.m = Longest(of_key)};
  for (const std::vector<Interval>& key : of_key) {
    for (size_t n = 0; n < runs.m; ++n) {
      const Interval interval = n < key.size() ? key[n] : Interval{};
      runs.start.push_back(interval.begin);
      runs.end.push_back(interval.end);
    }
  }
  return Mask(MaskPattern(std::move(runs)));
}

Mask Runs(const std::vector<std::vector<Progression>>& of_row) {
  RowRuns runs{.r = Longest(of_row)};
  for (const std::vector<Progression>& row : of_row) {
    for (size_t n = 0; n < runs.r; ++n) {
      const Progression one = n < row.size() ? row[n] : Progression{};
      runs.first.push_back(one.first);
      runs.stride.push_back(one.stride);
      runs.count.push_back(one.count);
    }
  }
  return Mask(MaskPattern(std::move(runs)));
}

Mask Rectangles(std::vector<MaskRectangle> of) {
  return Mask(MaskPattern(::attnd::Rectangles{std::move(of)}));
}

Mask Bits(const std::vector<std::vector<bool>>& dense) {
  MaskBitmap bits{.row_pitch_bits = Longest(dense)};
  bits.data.resize((dense.size() * bits.row_pitch_bits + 7) / 8);
  for (size_t row = 0; row < dense.size(); ++row) {
    for (size_t key = 0; key < dense[row].size(); ++key) {
      const size_t bit = row * bits.row_pitch_bits + key;
      if (dense[row][key]) bits.data[bit / 8] |= static_cast<uint8_t>(1 << bit % 8);
    }
  }
  return Mask(MaskPattern(std::move(bits)));
}

}  // namespace attnd::masks
