// What a mask by description has to know of a Problem (masks/compiled_mask.h). Any thread.
#pragma once

#include "attention/masks/mask_spec.h"
#include "attention/problem.h"

namespace attnd {

// Of a valid problem: its sizes, those of the longest sequence in packed layouts, and the diagonal
// of each batch entry, once where they are equal. Key lengths cut at run time and do not count, but
// where the diagonal is bottom_right they move it.
MaskCall MaskCallOf(const Problem& problem);

}  // namespace attnd
