// Random valid layouts over every op and option, with rows for calls of them: for tests and the
// fuzzer. Small: widths of 8 or 16, sequences of at most kRandomRows. The same seed gives the same
// on every machine. Any thread.
#pragma once

#include <cstdint>

#include "attention/random_problem.h"
#include "modules/call_rows.h"
#include "modules/graph.h"

namespace attnd {

inline constexpr int64_t kRandomRows = 10;

struct RandomModuleLimits {
  ElementType element = ElementType::kFloat32;
  int64_t max_layers = 3;
};

ModuleLayout RandomLayout(Random& random, const RandomModuleLimits& limits = {});

// Rows that CheckRows accepts: dense or packed, with key lengths, bool masks and positions.
CallRows RandomRows(Random& random, const ModuleGraph& graph);

}  // namespace attnd
