// ModulePlan: what a module needs of a device's memory, and which layers compute their activations
// again, decided once, before any memory is taken.
//
//   weights      parameters as they are kept, and the matrices' copies in the layout's element
//   optimizer    a float32 gradient of each trained number, and its moments
//   activations  kept_rows of what KeptValues names, each layer's logsumexp, and the memory
//   workspace    the largest of three schedules of one layer (forward, computing again, backward),
//                by the lifetimes of its values and their gradients; the boundary between layers
//                stands before it twice, since a layer reads one and writes the other
//
// Engines add scratch memory of their own kernels. Values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "modules/graph.h"
#include "modules/kept_values.h"
#include "modules/optimizer.h"
#include "modules/weight_table.h"

namespace attnd {

struct ModuleLimits {
  int64_t max_rows = 0, kept_rows = 0;  // of one call; of all whose activations are kept
  int64_t max_memory_rows = 0, kept_memory_rows = 0;
  std::optional<Recompute> recompute;  // absent: the least that fits
};

struct ModulePlan {
  int64_t weight_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t workspace_bytes = 0;
  std::vector<Recompute> recompute;  // [layers]
  double forward_flops = 0;          // of max_rows: products of linear ops, attention not counted
  double backward_flops = 0;         // computing again included
  int64_t bytes() const {
    return weight_bytes + optimizer_bytes + activation_bytes + workspace_bytes;
  }
};

// Errors: InvalidArgument "limits.max_rows: expected ..., got ..."; OutOfRange when it does not fit
// into `budget` bytes, with what would.
absl::StatusOr<ModulePlan> MakePlan(const ModuleGraph& graph, const WeightTable& weights,
                                    const OptimizerSpec& optimizer, const ModuleLimits& limits,
                                    int64_t budget);

}  // namespace attnd
