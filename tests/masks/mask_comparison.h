// Compares the compiler's mask with the oracle's answer for each score: for tests and the fuzzer.
// Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "attention/masks/compiled_mask.h"
#include "attention/masks/mask_plan.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

// The first difference, or "": of the canonical form as a set, of runs, and for each tile size of
// both lists, bitmaps, counts and empty rows. A mask that is refused is a difference.
std::string CompareWithOracle(const MaskSpec& spec, const MaskCall& call,
                              const std::vector<MaskTileSize>& tiles);

// The same of one plan of (b, h), which has row_keys.
std::string ComparePlanWithOracle(const MaskSpec& spec, const MaskCall& call, int64_t b, int64_t h,
                                  const MaskPlan& plan);

}  // namespace attnd
