#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/masks/canonical_parts.h"

namespace attnd {
namespace {

using Window = RelativeWindow;

MaskExpr CanonicalWindow(int64_t left, int64_t right) {
  if (left >= kMaskReach) left = -1;
  if (right >= kMaskReach) right = -1;
  if (left == -1 && right == -1) return Everything();
  return {Window{static_cast<int32_t>(left), static_cast<int32_t>(right)}, {}};
}

MaskExpr CanonicalStride(uint32_t p, uint32_t phase) {
  return p == 1 ? Everything() : MaskExpr{StrideRel{p, phase}, {}};
}

MaskExpr Leaf(const Dilated& e) {
  const int64_t left = e.left == -1 ? -1 : int64_t{e.left} * e.step;
  const int64_t right = e.right == -1 ? -1 : int64_t{e.right} * e.step;
  if (e.step == 1 || (left == 0 && right == 0)) return CanonicalWindow(left, right);
  Dilated same = e;
  if (left >= kMaskReach) same.left = -1;
  if (right >= kMaskReach) same.right = -1;
  if (same.left == -1 && same.right == -1) return CanonicalStride(e.step, 0);
  return {same, {}};
}

MaskExpr Leaf(const StrideCol& e) {
  if (e.lo == e.hi) return Nothing();
  if (e.lo == 0 && e.hi == e.p) return Everything();
  return {e, {}};
}

MaskExpr Leaf(const BlockWindow& e) {
  BlockWindow same = e;
  same.lo = static_cast<int32_t>(std::clamp<int64_t>(e.lo, -kMaskReach, kMaskReach));
  same.hi = static_cast<int32_t>(std::clamp<int64_t>(e.hi, -kMaskReach, kMaskReach));
  if (same.lo == -kMaskReach && same.hi == kMaskReach) return Everything();
  if (e.p == 1 && same.lo <= 0 && same.hi >= 0) return CanonicalWindow(-same.lo, same.hi);
  if (e.p <= INT32_MAX) {
    const int64_t p = e.p;
    for (int32_t& shift : same.shift) shift = static_cast<int32_t>((shift % p + p) % p);
  }
  MergeEqual(same.shift);
  if (same.shift == std::vector<int32_t>{0}) same.shift.clear();
  return {std::move(same), {}};
}

MaskExpr Leaf(const Global& e, const MaskExtents& extents) {
  const bool is_columns = e.direction == GlobalDirection::kColumns;
  Global same = {.direction = e.direction};
  for (size_t n = 0; n < e.start.size(); ++n) {
    const int64_t end = is_columns ? std::min<int64_t>(e.end[n], extents.keys) : e.end[n];
    if (e.start[n] >= end) continue;
    if (!same.end.empty() && same.end.back() == e.start[n]) {
      same.end.back() = static_cast<uint32_t>(end);
    } else {
      same.start.push_back(e.start[n]);
      same.end.push_back(static_cast<uint32_t>(end));
    }
  }
  if (same.start.empty()) return Nothing();
  const bool has_columns = e.direction != GlobalDirection::kRows;
  if (has_columns && same.start[0] == 0 && same.end[0] >= extents.keys) return Everything();
  return {std::move(same), {}};
}

MaskExpr Leaf(const Prefix& e, const MaskExtents& extents) {
  Prefix same = e;
  for (uint32_t& len : same.len) len = std::min(len, static_cast<uint32_t>(extents.keys));
  MergeEqual(same.len);
  if (same.len == std::vector<uint32_t>{0}) return Nothing();
  if (same.len == std::vector<uint32_t>{static_cast<uint32_t>(extents.keys)}) return Everything();
  return {std::move(same), {}};
}

MaskExpr Leaf(const Groups& e, const MaskExtents& extents) {
  const auto repeats = [](const std::vector<uint32_t>& ids, int64_t period) {
    return std::equal(ids.begin() + period, ids.end(), ids.begin());
  };
  Groups same = e;
  if (e.per_batch && repeats(e.row, extents.rows) && repeats(e.key, extents.keys)) {
    same.per_batch = false;
    same.row.resize(static_cast<size_t>(extents.rows));
    same.key.resize(static_cast<size_t>(extents.keys));
  }
  return {std::move(same), {}};
}

class Canonicaliser {
 public:
  Canonicaliser(const MaskExtents& extents, const CanonicalPatterns& earlier)
      : extents_(extents), earlier_(earlier) {}

  // The canonical form of expr, or of its negation.
  MaskExpr Of(const MaskExpr& expr, bool is_negated) const {
    if (std::holds_alternative<Negate>(expr.op)) return Of(expr.of[0], !is_negated);
    const bool is_all = std::holds_alternative<AllOf>(expr.op);
    if (is_all || std::holds_alternative<AnyOf>(expr.op)) {
      std::vector<MaskExpr> operands;  // De Morgan
      for (const MaskExpr& operand : expr.of) operands.push_back(Of(operand, is_negated));
      return Combine(is_all != is_negated, std::move(operands));
    }
    MaskExpr leaf = LeafOf(expr);
    if (!is_negated) return leaf;
    if (IsEverything(leaf)) return Nothing();
    if (std::holds_alternative<AllOf>(leaf.op) || IsNothing(leaf)) return Of(leaf, true);
    return {Negate{}, {std::move(leaf)}};
  }

 private:
  MaskExpr LeafOf(const MaskExpr& expr) const {
    if (auto* e = std::get_if<Window>(&expr.op)) return CanonicalWindow(e->left, e->right);
    if (auto* e = std::get_if<Dilated>(&expr.op)) return Leaf(*e);
    if (auto* e = std::get_if<StrideRel>(&expr.op)) return CanonicalStride(e->p, e->phase);
    if (auto* e = std::get_if<StrideCol>(&expr.op)) return Leaf(*e);
    if (auto* e = std::get_if<BlockWindow>(&expr.op)) return Leaf(*e);
    if (auto* e = std::get_if<Global>(&expr.op)) return Leaf(*e, extents_);
    if (auto* e = std::get_if<Prefix>(&expr.op)) return Leaf(*e, extents_);
    if (auto* e = std::get_if<Segment>(&expr.op)) return SegmentOf(*e);
    if (auto* e = std::get_if<Groups>(&expr.op)) return Leaf(*e, extents_);
    if (auto* e = std::get_if<RandomBlocks>(&expr.op)) return RandomOf(expr, *e);
    if (auto* e = std::get_if<PatternRef>(&expr.op)) return ReferenceTo(*e);
    return Everything();
  }

  MaskExpr SegmentOf(const Segment& e) const {
    Segment same = e;
    same.cu.erase(std::unique(same.cu.begin(), same.cu.end()), same.cu.end());
    if (same.cu.size() == 1) return Nothing();
    if (same.cu.size() > 2) return {std::move(same), {}};
    // One document: all, but for queries that the diagonal moves out of it.
    const auto inside = [&](GlobalDirection direction) {
      return Leaf(Global{{0}, {same.cu[1]}, direction}, extents_);
    };
    return Combine(true, {inside(GlobalDirection::kRows), inside(GlobalDirection::kColumns)});
  }

  MaskExpr RandomOf(const MaskExpr& expr, const RandomBlocks& e) const {
    const int64_t key_blocks = (extents_.keys + e.block - 1) / e.block;
    if (e.per_row == 0) return Nothing();
    RandomBlocks same = e;
    same.per_row = static_cast<uint32_t>(std::min<int64_t>(e.per_row, key_blocks));
    MaskExpr excluded = expr.of.empty() ? Nothing() : Of(expr.of[0], false);
    if (IsEverything(excluded)) return Nothing();
    if (!IsNothing(excluded)) return {same, {std::move(excluded)}};
    return same.per_row == key_blocks ? Everything() : MaskExpr{same, {}};
  }

  MaskExpr ReferenceTo(const PatternRef& e) const {
    const uint32_t number = earlier_.number[e.pattern];
    if (auto* expr = std::get_if<MaskExpr>(&earlier_.pattern[number])) {
      if (IsEverything(*expr) || IsNothing(*expr)) return *expr;
    }
    return {PatternRef{number}, {}};
  }

  // ---- Operands of all_of (any_of), canonical already.

  MaskExpr Combine(bool is_all, std::vector<MaskExpr> operands) const {
    std::vector<MaskExpr> flat;
    for (MaskExpr& operand : operands) {
      if (is_all ? IsEverything(operand) : IsNothing(operand)) continue;
      if (is_all ? IsNothing(operand) : IsEverything(operand)) return std::move(operand);
      if (is_all ? std::holds_alternative<AllOf>(operand.op)
                 : std::holds_alternative<AnyOf>(operand.op)) {
        std::move(operand.of.begin(), operand.of.end(), std::back_inserter(flat));
      } else {
        flat.push_back(std::move(operand));
      }
    }
    MergeWindows(is_all, flat);
    for (const MaskExpr& operand : flat) {
      if (is_all ? IsNothing(operand) : IsEverything(operand)) return operand;
    }
    if (!Sort(flat)) return is_all ? Nothing() : Everything();
    if (flat.empty()) return is_all ? Everything() : Nothing();
    if (flat.size() == 1) return std::move(flat[0]);
    if (is_all) return {AllOf{}, std::move(flat)};
    return {AnyOf{}, std::move(flat)};
  }

  static const Window* WindowIn(const MaskExpr& expr, bool is_negated) {
    if (!is_negated) return std::get_if<Window>(&expr.op);
    return std::holds_alternative<Negate>(expr.op) ? std::get_if<Window>(&expr.of[0].op) : nullptr;
  }

  // Windows hold the diagonal, so two of them always overlap: one is left of those that stand in
  // `flat`, and one of those that stand there negated.
  static void MergeWindows(bool is_all, std::vector<MaskExpr>& flat) {
    for (bool is_negated : {false, true}) {
      const bool intersects = is_all != is_negated;
      int64_t left = intersects ? kMaskReach : 0, right = left, count = 0;
      const auto merge = [&](int64_t bound, int64_t& merged) {
        if (bound == -1) bound = kMaskReach;
        merged = intersects ? std::min(merged, bound) : std::max(merged, bound);
      };
      for (const MaskExpr& operand : flat) {
        const Window* window = WindowIn(operand, is_negated);
        if (window == nullptr) continue;
        merge(window->left, left);
        merge(window->right, right);
        ++count;
      }
      if (count < 2) continue;
      std::erase_if(flat, [&](const MaskExpr& e) { return WindowIn(e, is_negated) != nullptr; });
      MaskExpr merged = CanonicalWindow(left, right);
      if (is_negated) merged = IsEverything(merged) ? Nothing() : MaskExpr{Negate{}, {merged}};
      flat.push_back(std::move(merged));
    }
  }

  // By their bytes, without duplicates; false if one is another's negation.
  bool Sort(std::vector<MaskExpr>& flat) const {
    std::vector<std::pair<std::string, size_t>> order;
    for (size_t n = 0; n < flat.size(); ++n) order.emplace_back(Name(flat[n]), n);
    std::sort(order.begin(), order.end());
    std::set<absl::string_view> names;
    std::vector<MaskExpr> sorted;
    for (const auto& [name, n] : order) {
      if (names.insert(name).second) sorted.push_back(std::move(flat[n]));
    }
    for (const MaskExpr& operand : sorted) {
      if (std::holds_alternative<Negate>(operand.op) && names.count(Name(operand.of[0])) > 0) {
        return false;
      }
    }
    flat = std::move(sorted);
    return true;
  }

  std::string Name(const MaskExpr& expr) const { return EncodeExpr(expr, earlier_.digest); }

  const MaskExtents& extents_;
  const CanonicalPatterns& earlier_;
};

}  // namespace

MaskExpr CanonicalExpr(const MaskExpr& expr, const MaskExtents& extents,
                       const CanonicalPatterns& earlier) {
  return Canonicaliser(extents, earlier).Of(expr, false);
}

}  // namespace attnd
