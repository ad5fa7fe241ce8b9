#include "modules/reference/layer_steps.h"

#include <utility>
#include <variant>

#include "base/check.h"
#include "modules/attention_problem.h"
#include "modules/reference/linear.h"
#include "modules/reference/pointwise.h"

namespace attnd {
namespace {

Numbers Product(const Numbers& a, double scale, const Numbers& b) {
  Numbers product(a.size());
  for (size_t n = 0; n < a.size(); ++n) product[n] = a[n] * (scale * b[n]);
  return product;
}

Numbers Scaled(double scale, Numbers values) {
  for (double& value : values) value *= scale;
  return values;
}

}  // namespace

LayerSteps::LayerSteps(const ModuleGraph& graph, const WeightTable& table,
                       const std::vector<Numbers>& weights, const Rounder& round,
                       const ModuleInputs& inputs, int64_t layer)
    : graph_(graph),
      table_(table),
      weights_(weights),
      round_(round),
      inputs_(inputs),
      layer_(layer),
      shapes_(graph.ShapesOf(layer)) {}

const Numbers& LayerSteps::Weight(int64_t parameter) const {
  return weights_[&table_.Of(layer_, parameter) - table_.entries().data()];
}

const Numbers* LayerSteps::WeightOrNull(const std::optional<int64_t>& parameter) const {
  return parameter.has_value() ? &Weight(*parameter) : nullptr;
}

Numbers* LayerSteps::GradientOf(const std::optional<int64_t>& parameter,
                                std::vector<Numbers>& gradients) const {
  if (!parameter.has_value()) return nullptr;
  const WeightEntry& entry = table_.Of(layer_, *parameter);
  if (!entry.trained_offset.has_value()) return nullptr;
  return &gradients[&entry - table_.entries().data()];
}

Numbers LayerSteps::Operand(const Numbers& value) const {
  Numbers operand = value;
  round_.To(graph_.layout().element, operand);
  return operand;
}

NormRule LayerSteps::RuleOf(const NormOp& op) const {
  NormRule rule{.kind = op.kind,
                .epsilon = op.epsilon,
                .weight_offset = op.weight_offset,
                .weight = WeightOrNull(op.weight),
                .bias = WeightOrNull(op.bias)};
  if (op.round_before_weight) rule.round_before_weight = graph_.layout().element;
  return rule;
}

NormRule LayerSteps::HeadRuleOf(const AttentionOp& op, const std::optional<int64_t>& weight) const {
  NormRule rule{.epsilon = op.qk_norm_epsilon,
                .weight_offset = op.qk_norm_weight_offset,
                .weight = WeightOrNull(weight)};
  if (op.qk_norm_round_before_weight) rule.round_before_weight = graph_.layout().element;
  return rule;
}

AttentionHeads LayerSteps::HeadsOf(const AttentionOp& op, const KeptLayer& state) const {
  const auto gathered = [&](const HeadColumns& heads) {
    return Operand(GatherHeads(heads, Columns(heads.value), state.values[heads.value]));
  };
  return {gathered(op.q), gathered(op.k), gathered(op.v)};
}

Problem LayerSteps::ProblemAt(int64_t op) const {
  auto problem = ProblemOf(graph_, layer_, op, inputs_.rows, inputs_.dropout);
  CHECK(problem.ok()) << problem.status().ToString();
  return *std::move(problem);
}

AttentionCall LayerSteps::CallOf(const AttentionOp& op, const Problem& problem,
                                 const std::vector<uint32_t>& positions) const {
  return {.op = op,
          .problem = problem,
          .positions = positions,
          .mask_bits = inputs_.mask_bits.data(),
          .q_rule = HeadRuleOf(op, op.q_norm),
          .k_rule = HeadRuleOf(op, op.k_norm),
          .round = round_};
}

ValueGradient LayerSteps::EmptyGradient(int64_t value) const {
  const ValueShape& shape = shapes_.values[value];
  return {inputs_.rows.RowsOf(shape.rows), shape.columns, graph_.ElementOf(layer_, value)};
}

// ---- Forward.

struct LayerSteps::ForwardOp {
  const LayerSteps& in;
  const int64_t number;
  KeptLayer& state;

  const Numbers& Value(int64_t value) const { return state.values[value]; }

  Numbers operator()(std::monostate) const { return {}; }
  Numbers operator()(const LinearOp& op) const {
    const LinearSizes sizes = in.SizesOf(op, number);
    return LinearForward(sizes, in.Operand(Value(op.input)), in.Weight(op.weight),
                         in.WeightOrNull(op.bias));
  }
  Numbers operator()(const NormOp& op) const {
    return NormForward(in.RuleOf(op), in.Columns(op.input), Value(op.input), in.round_);
  }
  Numbers operator()(const AttentionOp& op) const {
    const Problem problem = in.ProblemAt(number);
    const std::vector<uint32_t> positions = in.inputs_.rows.ResolvedPositions();
    AttentionOutput output =
        AttentionForward(in.CallOf(op, problem, positions), in.HeadsOf(op, state));
    state.lse[number] = std::move(output.lse);
    return std::move(output.o);
  }
  Numbers operator()(const ActivationOp& op) const {
    Numbers out = Value(op.input);
    for (double& x : out) x = Activate(op.kind, x);
    return out;
  }
  Numbers operator()(const BinaryOp& op) const {
    const Numbers &a = Value(op.a), &b = Value(op.b);
    if (op.kind == BinaryKind::kMultiply) return Product(a, op.b_scale, b);
    Numbers sum(a.size());
    for (size_t n = 0; n < a.size(); ++n) sum[n] = a[n] + double{op.b_scale} * b[n];
    return sum;
  }
  Numbers operator()(const DropoutOp& op) const { return in.Dropped(op, number, Value(op.input)); }
};

LinearSizes LayerSteps::SizesOf(const LinearOp& op, int64_t number) const {
  return {.rows = inputs_.rows.RowsOf(shapes_.values[op.input].rows),
          .in = Columns(op.input),
          .out = Columns(number + kFirstOpValue),
          .transposed = op.transposed};
}

Numbers LayerSteps::Dropped(const DropoutOp& op, int64_t number, const Numbers& values) const {
  if (!inputs_.dropout.is_training) return values;
  const DropoutPlace place{.seed = inputs_.dropout.seed,
                           .offset = SiteOffset(DropoutSite(graph_.first_layer() + layer_, number),
                                                inputs_.dropout.offset),
                           .first_row = inputs_.rows.first_row};
  return ApplyDropout(place, op.threshold, Columns(op.input), values);
}

void LayerSteps::Forward(int64_t op, KeptLayer& state) const {
  Numbers out = std::visit(ForwardOp{*this, op, state}, graph_.BlockOf(layer_).ops[op].kind);
  round_.To(graph_.ElementOf(layer_, op + kFirstOpValue), out);
  state.values[op + kFirstOpValue] = std::move(out);
}

// ---- Backward.

struct LayerSteps::BackwardOp {
  const LayerSteps& in;
  const int64_t number;
  const KeptLayer& state;
  const Numbers& d_out;
  std::vector<ValueGradient>& values;
  std::vector<Numbers>& gradients;

  const Numbers& Value(int64_t value) const { return state.values[value]; }
  void Add(int64_t value, const Numbers& gradient) const { values[value].Add(gradient, in.round_); }
  Numbers* Gradient(const std::optional<int64_t>& parameter) const {
    return in.GradientOf(parameter, gradients);
  }

  void operator()(std::monostate) const {}
  void operator()(const LinearOp& op) const {
    const LinearSizes sizes = in.SizesOf(op, number);
    const Numbers d = in.Operand(d_out);
    AddLinearGradients(sizes, in.Operand(Value(op.input)), d, in.round_, Gradient(op.weight),
                       Gradient(op.bias));
    Add(op.input, LinearInputGradient(sizes, d, in.Weight(op.weight)));
  }
  void operator()(const NormOp& op) const {
    const NormRule rule = in.RuleOf(op);
    const int64_t count = in.Columns(op.input);
    AddNormGradients(rule, count, 1, Value(op.input), d_out, in.round_, Gradient(op.weight),
                     Gradient(op.bias));
    Add(op.input, NormInputGradient(rule, count, Value(op.input), d_out));
  }
  void operator()(const AttentionOp& op) const {
    const Problem problem = in.ProblemAt(number);
    const std::vector<uint32_t> positions = in.inputs_.rows.ResolvedPositions();
    const AttentionOutput output{Value(number + kFirstOpValue), state.lse[number]};
    const AttentionHeads d =
        AttentionBackward(in.CallOf(op, problem, positions), in.HeadsOf(op, state), output,
                          in.Operand(d_out), Gradient(op.q_norm), Gradient(op.k_norm));
    values[op.v.value].Add(op.v.first_column, op.v.columns(), d.v, in.round_);
    values[op.k.value].Add(op.k.first_column, op.k.columns(), d.k, in.round_);
    values[op.q.value].Add(op.q.first_column, op.q.columns(), d.q, in.round_);
  }
  void operator()(const ActivationOp& op) const {
    Numbers d = d_out;
    const Numbers& x = Value(op.input);
    for (size_t n = 0; n < d.size(); ++n) d[n] = ActivationGradient(op.kind, x[n], d[n]);
    Add(op.input, d);
  }
  void operator()(const BinaryOp& op) const {
    const bool is_product = op.kind == BinaryKind::kMultiply;
    Add(op.b, is_product ? Product(d_out, op.b_scale, Value(op.a)) : Scaled(op.b_scale, d_out));
    Add(op.a, is_product ? Product(d_out, op.b_scale, Value(op.b)) : d_out);
  }
  void operator()(const DropoutOp& op) const { Add(op.input, in.Dropped(op, number, d_out)); }
};

void LayerSteps::Backward(int64_t op, const KeptLayer& state, const Numbers& d_out,
                          std::vector<ValueGradient>& values,
                          std::vector<Numbers>& gradients) const {
  std::visit(BackwardOp{*this, op, state, d_out, values, gradients},
             graph_.BlockOf(layer_).ops[op].kind);
}

}  // namespace attnd
