// What a mask by description has to know of a Problem.
#pragma once

#include "attention/masks/mask_spec.h"
#include "attention/problem.h"

namespace attnd {

// Sizes and diagonals of a problem whose other fields are valid: lengths are the longest
// sequence's, key padding counted.
MaskCall MaskCallOf(const Problem& problem);

}  // namespace attnd
