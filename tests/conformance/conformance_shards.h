// The promise that cutting changes no bit: a call cut by batch entry and key-head group, and
// forward by rows too, each piece launched as a problem of its own as attnd's client does, gives
// the bits of the uncut call, the gradient of a broadcast bias included. Used by
// backend_conformance.cc only.
#pragma once

#include <string>
#include <vector>

#include "tests/conformance/conformance_launch.h"

namespace attnd {

// Lists what differs, one line each; empty when nothing does. `backward` is empty where the engine
// has none.
std::vector<std::string> CompareShards(Backend& backend, CallMemory& memory, const Problem& problem,
                                       const ProblemInputs& inputs, const ForwardResults& forward,
                                       const BackwardResults& backward);

}  // namespace attnd
