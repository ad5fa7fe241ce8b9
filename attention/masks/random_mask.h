// Random valid masks with calls that use them, over every kind, option and limit of small sizes:
// for tests, the conformance table and the fuzzer. The same choices give the same mask on every
// machine. Any thread.
#pragma once

#include <cstdint>
#include <functional>

#include "attention/masks/mask_spec.h"

namespace attnd {

struct RandomMaskCase {
  MaskSpec spec;
  MaskCall call;
};

// `choose(low, high)` gives a number between both, inclusive. Rows and keys are at most
// `max_length`, with at most `max_scores` scores of all batch entries and heads.
RandomMaskCase RandomMask(const std::function<int64_t(int64_t low, int64_t high)>& choose,
                          int64_t max_length, int64_t max_scores);

// One for the sizes and diagonals of `call`, which may be a part of it.
MaskSpec RandomMaskFor(const std::function<int64_t(int64_t low, int64_t high)>& choose,
                       const MaskCall& call);

}  // namespace attnd
