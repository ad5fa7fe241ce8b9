// LayerSteps: the ops of one layer in one call, one at a time, forward and backward. What
// ModuleReference is made of. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "modules/graph.h"
#include "modules/reference/attention_step.h"
#include "modules/reference/gradient_sums.h"
#include "modules/reference/linear.h"
#include "modules/reference/module_state.h"
#include "modules/weight_table.h"

namespace attnd {

class LayerSteps {
 public:
  // All outlive the object. `weights` as ModuleReference holds them.
  LayerSteps(const ModuleGraph& graph, const WeightTable& table,
             const std::vector<Numbers>& weights, const Rounder& round, const ModuleInputs& inputs,
             int64_t layer);

  // Sets the output of `op`, and its lse, from the values before it.
  void Forward(int64_t op, KeptLayer& state) const;

  // Adds the gradients of what `op` read, last use first, given its output's; and those of its
  // parameters.
  void Backward(int64_t op, const KeptLayer& state, const Numbers& d_out,
                std::vector<ValueGradient>& values, std::vector<Numbers>& gradients) const;

  ValueGradient EmptyGradient(int64_t value) const;

 private:
  struct ForwardOp;
  struct BackwardOp;

  const Numbers& Weight(int64_t parameter) const;
  const Numbers* WeightOrNull(const std::optional<int64_t>& parameter) const;
  // Null where the parameter is absent or frozen.
  Numbers* GradientOf(const std::optional<int64_t>& parameter,
                      std::vector<Numbers>& gradients) const;
  int64_t Columns(int64_t value) const { return shapes_.values[value].columns; }
  Numbers Operand(const Numbers& value) const;  // of a product: rounded to the layout's element
  LinearSizes SizesOf(const LinearOp& op, int64_t number) const;
  Numbers Dropped(const DropoutOp& op, int64_t number, const Numbers& values) const;
  NormRule RuleOf(const NormOp& op) const;
  NormRule HeadRuleOf(const AttentionOp& op, const std::optional<int64_t>& weight) const;
  AttentionHeads HeadsOf(const AttentionOp& op, const KeptLayer& state) const;
  AttentionCall CallOf(const AttentionOp& op, const Problem& problem,
                       const std::vector<uint32_t>& positions) const;
  Problem ProblemAt(int64_t op) const;

  const ModuleGraph& graph_;
  const WeightTable& table_;
  const std::vector<Numbers>& weights_;
  const Rounder& round_;
  const ModuleInputs& inputs_;
  const int64_t layer_;
  const BlockShapes& shapes_;
};

}  // namespace attnd
