#include "attention/masks/mask_description.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/masks/canonical_parts.h"
#include "attention/masks/mask_nodes.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

// Which patterns some head uses, itself or by reference.
std::vector<bool> Reachable(const MaskSpec& spec) {
  std::vector<bool> reachable(spec.pattern.size());
  for (uint32_t n : spec.pattern_of) reachable[n] = true;
  for (size_t n = spec.pattern.size(); n-- > 0;) {  // references point backwards
    if (!reachable[n]) continue;
    if (const MaskExpr* expr = ExprOf(spec.pattern[n])) {
      VisitNodes(*expr, [&](const MaskExpr& node) {
        if (auto* ref = std::get_if<PatternRef>(&node.op)) reachable[ref->pattern] = true;
      });
    }
  }
  return reachable;
}

// Each pattern that is reachable, in canonical form and once.
CanonicalPatterns DistinctPatterns(const MaskSpec& spec) {
  CanonicalPatterns distinct;
  std::unordered_map<std::string, uint32_t> by_digest;
  const std::vector<bool> reachable = Reachable(spec);
  for (size_t n = 0; n < spec.pattern.size(); ++n) {
    distinct.number.push_back(0);
    if (!reachable[n]) continue;
    MaskPattern pattern = CanonicalPattern(spec.pattern[n], spec.extents, distinct);
    auto* expr = std::get_if<MaskExpr>(&pattern);
    if (auto* ref = expr != nullptr ? std::get_if<PatternRef>(&expr->op) : nullptr) {
      distinct.number[n] = ref->pattern;
      continue;
    }
    const auto hash = Sha256(EncodePattern(pattern, distinct.digest));
    const auto [found, is_new] = by_digest.try_emplace(
        std::string(hash.begin(), hash.end()), static_cast<uint32_t>(distinct.pattern.size()));
    distinct.number[n] = found->second;
    if (!is_new) continue;
    distinct.pattern.push_back(std::move(pattern));
    distinct.digest.push_back(found->first);
  }
  return distinct;
}

// [batch·heads] → [heads] → [1], as far as entries are equal.
void NarrowPatternOf(MaskSpec& spec) {
  std::vector<uint32_t>& of = spec.pattern_of;
  const size_t heads = static_cast<size_t>(spec.extents.q_heads);
  const bool per_batch = heads > 0 && of.size() > heads;
  if (per_batch && std::equal(of.begin() + static_cast<int64_t>(heads), of.end(), of.begin())) {
    of.resize(heads);
  }
  MergeEqual(of);
}

bool AnyNode(const std::vector<MaskPattern>& patterns, bool (*holds)(const MaskExpr&)) {
  bool any = false;
  for (const MaskPattern& pattern : patterns) {
    const MaskExpr* expr = ExprOf(pattern);
    if (expr != nullptr) VisitNodes(*expr, [&](const MaskExpr& node) { any |= holds(node); });
  }
  return any;
}

// Sizes that no longer matter are 0.
void NarrowExtents(MaskSpec& spec) {
  const bool per_batch =
      static_cast<int64_t>(spec.pattern_of.size()) > std::max<int64_t>(spec.extents.q_heads, 1);
  if (!per_batch && !AnyNode(spec.pattern, CountsBatch)) spec.extents.batch = 0;
  if (spec.pattern_of.size() == 1) spec.extents.q_heads = 0;
}

// Numbers patterns by their first use, what they refer to before them.
class Renumbering {
 public:
  explicit Renumbering(std::vector<MaskPattern> patterns)
      : patterns_(std::move(patterns)), number_(patterns_.size()) {}

  uint32_t NumberOf(uint32_t pattern) {
    if (number_[pattern]) return *number_[pattern];
    if (MaskExpr* expr = ExprOf(patterns_[pattern])) {
      VisitNodes(*expr, [&](MaskExpr& node) {
        if (auto* ref = std::get_if<PatternRef>(&node.op)) ref->pattern = NumberOf(ref->pattern);
      });
    }
    number_[pattern] = static_cast<uint32_t>(ordered_.size());
    ordered_.push_back(std::move(patterns_[pattern]));
    return *number_[pattern];
  }
  std::vector<MaskPattern> Take() { return std::move(ordered_); }

 private:
  std::vector<MaskPattern> patterns_, ordered_;
  std::vector<std::optional<uint32_t>> number_;
};

}  // namespace

MaskSpec CanonicalMask(const MaskSpec& spec) {
  CanonicalPatterns distinct = DistinctPatterns(spec);
  MaskSpec canonical;
  canonical.empty_row = spec.empty_row;
  canonical.extents = spec.extents;
  for (uint32_t n : spec.pattern_of) canonical.pattern_of.push_back(distinct.number[n]);
  NarrowPatternOf(canonical);
  Renumbering renumbering(std::move(distinct.pattern));
  for (uint32_t& n : canonical.pattern_of) n = renumbering.NumberOf(n);
  canonical.pattern = renumbering.Take();
  NarrowExtents(canonical);
  return canonical;
}

MaskDescription::MaskDescription(MaskSpec canonical)
    : spec_(std::move(canonical)),
      id_(Sha256(absl::StrCat(absl::string_view("attnd.mask/1\0", 13), EncodeMask(spec_)))),
      bytes_(static_cast<int64_t>(sizeof(*this)) + BytesOf(spec_)),
      depends_on_diagonal_(AnyNode(spec_.pattern, CountsQueries)) {}

absl::StatusOr<std::shared_ptr<const MaskDescription>> MaskDescription::Make(const MaskSpec& spec,
                                                                             const MaskCall& call) {
  RETURN_IF_ERROR(ValidateMask(spec, call));
  MaskSpec whole = spec;
  whole.extents = ResolvedExtents(spec, call);
  return std::shared_ptr<const MaskDescription>(new MaskDescription(CanonicalMask(whole)));
}

}  // namespace attnd
