// MaskOracle: one score's fate by the definition of each kind, in plain loops over the spec as it
// was sent. It shares nothing with validation, canonical form or compilation, which are tested
// against it; the reference engine asks it. Slow: a call costs the size of what it looks through.
// Any thread. Errors: none, the spec is valid for the call (ValidateMask).
#pragma once

#include <cstdint>

#include "attention/masks/mask_spec.h"

namespace attnd {

// Whether row i of query head h of batch entry or sequence b sees key j, by the mask alone. The
// origin is the spec's; extents that are 0 are the call's.
bool IsVisible(const MaskSpec& spec, const MaskCall& call, int64_t b, int64_t h, int64_t i,
               int64_t j);

}  // namespace attnd
