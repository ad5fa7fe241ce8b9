// Decides which values of a layer are kept between Forward and Backward. Backward reads the inputs
// of products, norms, activations and multiplications, and attention's output; what is not kept is
// computed again from what is, by the same steps, so that no bit depends on the choice. Pure
// functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/graph.h"

namespace attnd {

enum class Recompute : uint8_t {
  kNone = 1,
  kPointwise = 2,  // norms, activations, binary ops, dropout: no product twice
  kLayers = 3,     // all but the layer's input
};

// [ops + 2] of a block. The layer's input is always kept; the memory is the call's, not a layer's.
std::vector<bool> KeptValues(const ModuleGraph& graph, int64_t block, Recompute recompute);

// [ops + 2]: the values that backward reads.
std::vector<bool> NeededValues(const ModuleGraph& graph, int64_t block);

// Norm, activation, binary or dropout.
bool IsPointwise(const ModuleOp& op);

}  // namespace attnd
