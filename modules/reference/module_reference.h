// ModuleReference: a module forward and backward in float64 and plain loops: the oracle of every
// engine of modules. It is never made fast. With Rounding::kExact nothing is rounded and backward
// is the derivative of forward; with kElements values are rounded where the contract says
// (rounding.h, gradient_sums.h, proto/attnd/v1/module.proto).
//
// x and y are [rows, width], the memory [memory rows, memory_width]. Weights and gradients are one
// list of numbers for each entry of the weight table; gradients go on from what they hold. One call
// at a time; the graph and the weights outlive the object. Errors: none, the rows have been checked
// (CheckRows) and the numbers have the right sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/graph.h"
#include "modules/kept_values.h"
#include "modules/reference/module_state.h"
#include "modules/reference/rounding.h"
#include "modules/weight_table.h"

namespace attnd {

struct KeptActivations {
  std::vector<KeptLayer> layers;  // up to the last that was run
};

struct ForwardResult {
  Numbers y;
  KeptActivations kept;
};

struct OutputGradients {
  Numbers dy;
  Numbers d_memory;  // what it is added to; empty: nothing
};

struct BackwardResult {
  Numbers dx;
  Numbers d_memory;  // empty without
};

class ModuleReference {
 public:
  // `weights` as the parameters are kept; where the reference rounds, matrices are cast to the
  // layout's element here.
  ModuleReference(const ModuleGraph& graph, const WeightTable& table, std::vector<Numbers> weights,
                  Rounding rounding);

  // `recompute`: of each layer.
  ForwardResult Forward(const ModuleInputs& inputs, const std::vector<Recompute>& recompute) const;

  // Adds to `gradients`, one list for each entry of the table; those of frozen parameters are not
  // touched and may be empty.
  BackwardResult Backward(const ModuleInputs& inputs, const KeptActivations& kept,
                          const OutputGradients& of, std::vector<Numbers>& gradients) const;

  std::vector<Numbers> EmptyGradients() const;  // zeros; empty for frozen parameters

 private:
  const ModuleGraph& graph_;
  const WeightTable& table_;
  std::vector<Numbers> weights_;
  Rounder round_;
};

}  // namespace attnd
