#include "modules/reference/module_reference.h"

#include <utility>

#include "modules/layer_schedule.h"
#include "modules/reference/layer_steps.h"

namespace attnd {
namespace {

// Forgets what is not kept.
void Drop(const std::vector<bool>& kept, KeptLayer& state) {
  for (size_t value = 0; value < kept.size(); ++value) {
    if (kept[value]) continue;
    state.values[value] = Numbers();
    if (value >= kFirstOpValue) state.lse[value - kFirstOpValue] = Numbers();
  }
}

}  // namespace

ModuleReference::ModuleReference(const ModuleGraph& graph, const WeightTable& table,
                                 std::vector<Numbers> weights, Rounding rounding)
    : graph_(graph), table_(table), weights_(std::move(weights)), round_(rounding) {
  for (size_t n = 0; n < weights_.size(); ++n) {
    const bool is_matrix = table.entries()[n].is_matrix();
    round_.To(is_matrix ? graph.layout().element : ElementType::kFloat32, weights_[n]);
  }
}

ForwardResult ModuleReference::Forward(const ModuleInputs& inputs,
                                       const std::vector<Recompute>& recompute) const {
  ForwardResult result;
  Numbers x = inputs.x;
  const LayerRange layers = graph_.Resolved(inputs.layers);
  result.kept.layers.resize(layers.end);
  for (int64_t layer = layers.first; layer < layers.end; ++layer) {
    const LayerSteps steps(graph_, table_, weights_, round_, inputs, layer);
    const int64_t ops = static_cast<int64_t>(graph_.BlockOf(layer).ops.size());
    KeptLayer state{.recompute = recompute[layer]};
    state.values.resize(ops + kFirstOpValue);
    state.lse.resize(ops);
    state.values[kInputValue] = std::move(x);
    state.values[kMemoryValue] = inputs.memory;
    for (int64_t op = 0; op < ops; ++op) steps.Forward(op, state);
    x = state.values.back();
    Drop(KeptValues(graph_, graph_.layout().layers[layer].block, recompute[layer]), state);
    result.kept.layers[layer] = std::move(state);
  }
  round_.To(graph_.BorderElement(layers.end), x);
  result.y = std::move(x);
  return result;
}

BackwardResult ModuleReference::Backward(const ModuleInputs& inputs, const KeptActivations& kept,
                                         const OutputGradients& of,
                                         std::vector<Numbers>& gradients) const {
  Numbers d_out = of.dy;
  ValueGradient d_memory;
  const LayerRange layers = graph_.Resolved(inputs.layers);
  for (int64_t layer = layers.end - 1; layer >= layers.first; --layer) {
    const LayerSteps steps(graph_, table_, weights_, round_, inputs, layer);
    const int64_t block = graph_.layout().layers[layer].block;
    const int64_t ops = static_cast<int64_t>(graph_.BlockOf(layer).ops.size());
    KeptLayer state = kept.layers[layer];
    state.values[kMemoryValue] = inputs.memory;
    const std::vector<bool> again = RecomputedValues(graph_, block, state.recompute);
    for (int64_t op = 0; op < ops; ++op) {
      if (again[op + kFirstOpValue]) steps.Forward(op, state);
    }
    std::vector<ValueGradient> values;
    for (int64_t value = 0; value < ops + kFirstOpValue; ++value) {
      values.push_back(steps.EmptyGradient(value));
    }
    if (layer + 1 < layers.end) {
      std::swap(values[kMemoryValue], d_memory);
    } else if (!of.d_memory.empty()) {
      values[kMemoryValue].Add(of.d_memory, round_);
    }
    values.back().Add(d_out, round_);
    for (int64_t op = ops - 1; op >= 0; --op) {
      steps.Backward(op, state, values[op + kFirstOpValue].values(), values, gradients);
    }
    d_out = values[kInputValue].values();
    d_memory = std::move(values[kMemoryValue]);
  }
  round_.To(graph_.BorderElement(layers.first), d_out);
  return {std::move(d_out), d_memory.values()};
}

std::vector<Numbers> ModuleReference::EmptyGradients() const {
  std::vector<Numbers> gradients;
  for (const WeightEntry& entry : table_.entries()) {
    gradients.emplace_back(entry.trained_offset.has_value() ? entry.elements : 0);
  }
  return gradients;
}

}  // namespace attnd
