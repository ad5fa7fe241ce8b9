// PartsOf: the parts in which a forward call passes its first layer and its last one, each when its
// rows of x have come, and before its rows of y go. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/layers/executor/instance_tensors.h"
#include "modules/graph.h"

namespace attnd {

// Whole sequences in their order, with at least `part_bytes` of x each, about; empty: the call
// stays whole. `part_bytes` 0: it does.
std::vector<InstanceCall> PartsOf(const ModuleGraph& graph, const InstanceCall& call,
                                  LayerRange layers, int64_t part_bytes);

}  // namespace attnd
