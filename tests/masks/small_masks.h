// Masks by description in few words, for tests. A mask that cannot be made ends the test.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "base/check.h"

namespace attnd {

inline MaskExpr Leaf(auto op) { return {.op = std::move(op), .of = {}}; }
inline MaskExpr Window(int32_t left, int32_t right) { return Leaf(RelativeWindow{left, right}); }
inline MaskExpr CausalMask() { return Window(-1, 0); }
inline MaskExpr All(std::vector<MaskExpr> of) { return {.op = AllOf(), .of = std::move(of)}; }
inline MaskExpr Any(std::vector<MaskExpr> of) { return {.op = AnyOf(), .of = std::move(of)}; }
inline MaskExpr Not(MaskExpr of) { return {.op = Negate(), .of = {std::move(of)}}; }

inline MaskSpec SpecOf(std::vector<MaskPattern> patterns, std::vector<uint32_t> pattern_of = {0}) {
  return {.pattern = std::move(patterns), .pattern_of = std::move(pattern_of)};
}

// Describes the mask for the problem's sizes and diagonal.
inline void SetMask(const MaskSpec& spec, Problem& p) {
  auto mask = MaskDescription::Make(spec, MaskCallOf(p));
  CHECK(mask.ok()) << mask.status().ToString();
  p.mask = *std::move(mask);
}
inline void SetMask(MaskPattern pattern, Problem& p) { SetMask(SpecOf({std::move(pattern)}), p); }

}  // namespace attnd
