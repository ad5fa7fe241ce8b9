// Rows whose keys all have a bias of one enormous size: beside it the products vanish, so that O is
// the plain average of V, and lse the bias. Masks are often written so, with the lowest number of a
// type, and rows of padding see nothing else; far lower biases in the same row do not count. So it
// is with scores of 0 under the smallest softcap.
// Used by backend_conformance.cc only.
#pragma once

#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/conformance/conformance_case.h"

namespace attnd {

// Lists what differs from that; empty if nothing does.
std::vector<std::string> CompareWithAverages(Backend& backend, CallMemory& memory,
                                             ElementType element);

}  // namespace attnd
