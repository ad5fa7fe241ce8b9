// ResidueForm: a strided or dilated mask, recognised from its canonical form. It shows row Q only
// keys J with (Q − J) mod p = phase, and of those all between two diagonals. So rows of one residue
// see keys of one residue, and each such class is a problem of its own, dense or with a window, on
// every p-th row of the same tensors (attention/residue_classes.h). Pure function; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention/masks/mask_spec.h"

namespace attnd {

struct ResidueForm {
  int64_t p = 0, phase = 0;       // p ≥ 2, phase < p
  int64_t left = -1, right = -1;  // Q − left ≤ J ≤ Q + right; −1: no bound on that side
  friend bool operator==(const ResidueForm&, const ResidueForm&) = default;
};

// The narrower of two bounds of a window, where −1 is none.
inline int64_t TighterBound(int64_t a, int64_t b) { return a < 0 ? b : b < 0 ? a : std::min(a, b); }

// Finds the residue form of a canonical mask: one pattern for all heads and batch entries, which is
// a stride, a dilated window, or the intersection of one of these with windows. Absent for any
// other mask.
std::optional<ResidueForm> ResidueFormOf(const MaskSpec& canonical);

}  // namespace attnd
