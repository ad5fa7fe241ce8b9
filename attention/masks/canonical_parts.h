// The canonical form of a mask's parts: expressions with their operands in order, and lists without
// what cannot matter. Each holds the same set as before, wherever the diagonal lies as long as
// |J − Q| < kMaskReach, which every valid call keeps. Pure functions of valid parts; any thread.
#pragma once

#include <cstdint>

#include "attention/masks/mask_encoding.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

// Above |J − Q| of every score: keys, key_begin, rows and offset are each at most 2²⁰.
inline constexpr int64_t kMaskReach = 4 * kMaxMaskLength;

inline MaskExpr Everything() { return {AllKeys{}, {}}; }
inline MaskExpr Nothing() { return {AnyOf{}, {}}; }
inline bool IsEverything(const MaskExpr& expr) { return std::holds_alternative<AllKeys>(expr.op); }
inline bool IsNothing(const MaskExpr& expr) {
  return std::holds_alternative<AnyOf>(expr.op) && expr.of.empty();
}

// Maps pattern_ref while patterns are brought into order: each earlier pattern to its new number,
// and each new number to its pattern's digest.
struct CanonicalPatterns {
  std::vector<MaskPattern> pattern;
  PatternNames digest;
  std::vector<uint32_t> number;  // of each of the caller's patterns that are there so far
};

MaskExpr CanonicalExpr(const MaskExpr& expr, const MaskExtents& extents,
                       const CanonicalPatterns& earlier);
// A list that says all or nothing, or leaves its base alone, becomes an expression.
MaskPattern CanonicalPattern(const MaskPattern& pattern, const MaskExtents& extents,
                             const CanonicalPatterns& earlier);

// `values` with one entry where all are equal.
template <class T>
void MergeEqual(std::vector<T>& values) {
  for (const T& value : values) {
    if (value != values.front()) return;
  }
  if (!values.empty()) values.resize(1);
}

}  // namespace attnd
