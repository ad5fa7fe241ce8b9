// OpOrder: in which order a layer's ops run, and which of them may run together. Backward goes the
// other way. An activation, a sum, a product or dropout whose first reader is pointwise runs just
// before it, if no op between reads the same values: so each value's gradients are added in the
// order of the ops, and no bit depends on the order. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/graph.h"

namespace attnd {

struct OpOrder {
  std::vector<int64_t> ops;  // by place
  // By op. Pointwise ops one after the other share a step; any of them may run as one kernel, so
  // what one of them reads or writes lives as long as the step.
  std::vector<int64_t> steps;
  int64_t step_count = 0;

  int64_t StepOf(int64_t op) const { return steps[op]; }
  int64_t BackwardStepOf(int64_t op) const { return 2 * step_count - 1 - steps[op]; }
};

OpOrder OrderOf(const ModuleGraph& graph, int64_t block);

}  // namespace attnd
