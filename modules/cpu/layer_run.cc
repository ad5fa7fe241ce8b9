#include "modules/cpu/layer_run.h"

#include <cstring>
#include <variant>

#include "base/check.h"
#include "base/status_macros.h"
#include "modules/attention_problem.h"

namespace attnd {
namespace {

static_assert(static_cast<int>(Curve::kRelu) == static_cast<int>(ActivationKind::kRelu) &&
              static_cast<int>(Curve::kTanh) == static_cast<int>(ActivationKind::kTanh));
Curve CurveOf(ActivationKind kind) { return static_cast<Curve>(kind); }

// Columns of parameters' sums that one thread takes.
constexpr int64_t kSumColumns = 64;

}  // namespace

std::byte* LayerRun::Buffer(BufferUse use, int64_t number) const {
  const int64_t at = places_.At(use, number);
  return at < 0 ? nullptr : module_.layer_buffers() + at;
}

// Values by weights, or gradients by weights: a and c are the caller's.
DenseProduct LayerRun::ProductOf(const LinearOp& op, bool is_forward) const {
  const Tensor weight = module_.Weight(layer_, op.weight);
  const std::vector<int64_t>& shape = module_.graph().BlockOf(layer_).parameters[op.weight].shape;
  const int64_t in = Columns(op.input), out = shape[op.transposed ? 1 : 0];
  DenseProduct product{.rows = Rows(op.input),
                       .columns = is_forward ? out : in,
                       .depth = is_forward ? in : out,
                       .operand = module_.element()};
  if (is_forward != op.transposed) {
    product.b = {module_.Panels(layer_, op.weight), module_.element(), 0};
    product.b_order = DenseOrder::kPanels;
  } else {
    product.b = {weight.data, weight.element, product.columns};
    product.b_order = DenseOrder::kDepth;
  }
  return product;
}

NormOperands LayerRun::NormOf(const NormOp& op) const {
  NormOperands norm{.count = Columns(op.input),
                    .is_centred = op.kind == NormKind::kLayer,
                    .epsilon = op.epsilon,
                    .weight_offset = op.weight_offset,
                    .weight = module_.WeightOrNull(layer_, op.weight),
                    .bias = module_.WeightOrNull(layer_, op.bias),
                    .x = values_.values[op.input]};
  if (op.round_before_weight) norm.round_before_weight = module_.element();
  return norm;
}

DropoutRule LayerRun::RuleOf(const DropoutOp& op, int64_t number) const {
  return {.seed = call_.dropout.seed,
          .offset = SiteOffset(DropoutSite(layer_, number), call_.dropout.offset),
          .threshold = call_.dropout.is_training ? op.threshold : 0,
          .first_row = call_.rows.first_row};
}

// ---- Forward.

struct LayerRun::ForwardOp {
  const LayerRun& in;
  const int64_t number;

  const Tensor& Value(int64_t value) const { return in.values_.values[value]; }
  const Tensor& Out() const { return Value(number + kFirstOpValue); }
  int64_t Count() const { return in.Count(number + kFirstOpValue); }
  Workers& workers() const { return in.module_.workers(); }

  absl::Status operator()(std::monostate) const { return absl::OkStatus(); }
  absl::Status operator()(const LinearOp& op) const {
    DenseProduct product = in.ProductOf(op, true);
    const Tensor& input = Value(op.input);
    product.a = {input.data, input.element, product.depth};
    if (op.bias.has_value()) {
      const Tensor bias = in.module_.Weight(in.layer_, *op.bias);
      product.bias = bias.data;
      product.bias_element = bias.element;
    }
    product.c = Out().data;
    product.c_element = Out().element;
    workers().Run(product);
    return absl::OkStatus();
  }
  absl::Status operator()(const NormOp& op) const {
    const NormOperands norm = in.NormOf(op);
    workers().ForRows(in.Rows(op.input), norm.count,
                      [&](IndexRange rows) { NormForward(norm, Out(), rows); });
    return absl::OkStatus();
  }
  absl::Status operator()(const AttentionOp&) const {
    return AttentionRun(in.module_, in.call_, in.layer_, number, in.values_)
        .Forward(
            {in.Buffer(BufferUse::kTurnedQuery, number), in.Buffer(BufferUse::kTurnedKey, number)});
  }
  absl::Status operator()(const ActivationOp& op) const {
    workers().ForNumbers(Count(), [&](IndexRange numbers) {
      ApplyCurve(CurveOf(op.kind), Value(op.input), Out(), numbers);
    });
    return absl::OkStatus();
  }
  absl::Status operator()(const BinaryOp& op) const {
    const bool is_product = op.kind == BinaryKind::kMultiply;
    workers().ForNumbers(Count(), [&](IndexRange numbers) {
      Combine(is_product ? Combination::kProduct : Combination::kSum, Value(op.a), op.b_scale,
              Value(op.b), Out(), false, numbers);
    });
    return absl::OkStatus();
  }
  absl::Status operator()(const DropoutOp& op) const {
    const DropoutRule rule = in.RuleOf(op, number);
    const int64_t columns = in.Columns(op.input);
    workers().ForRows(in.Rows(op.input), columns, [&](IndexRange rows) {
      DropRows(rule, columns, Value(op.input), Out(), false, rows);
    });
    return absl::OkStatus();
  }
};

absl::Status LayerRun::Forward(int64_t op) const {
  return std::visit(ForwardOp{*this, op}, module_.graph().BlockOf(layer_).ops[op].kind);
}

// ---- Backward.

struct LayerRun::BackwardOp {
  const LayerRun& in;
  const int64_t number;
  const bool adds;
  LayerGradients& gradients;

  const Tensor& Value(int64_t value) const { return in.values_.values[value]; }
  ConstTensor Out() const { return gradients.values[number + kFirstOpValue]; }
  Workers& workers() const { return in.module_.workers(); }
  float* Gradient(const std::optional<int64_t>& parameter) const {
    return adds ? in.module_.Gradient(in.layer_, parameter) : nullptr;
  }

  // A use's share of a value's gradient: give(place, whether to add).
  template <class Give>
  void Add(int64_t value, const Give& give) const {
    const bool add = gradients.is_set[value];
    gradients.is_set[value] = true;
    give(gradients.values[value], add);
  }
  void AddNumbers(int64_t value, Combination kind, float scale, int64_t other) const {
    Add(value, [&](const Tensor& place, bool add) {
      workers().ForNumbers(in.Count(value), [&](IndexRange numbers) {
        Combine(kind, Out(), scale, kind == Combination::kScaled ? Out() : Value(other), place, add,
                numbers);
      });
    });
  }

  absl::Status operator()(std::monostate) const { return absl::OkStatus(); }
  absl::Status operator()(const LinearOp& op) const {
    AddWeightGradient(op);
    DenseProduct product = in.ProductOf(op, false);
    product.a = {Out().data, Out().element, product.depth};
    Add(op.input, [&](const Tensor& place, bool add) {
      product.result = add ? DenseResult::kAdd : DenseResult::kStore;
      product.c = place.data;
      product.c_element = place.element;
      workers().Run(product);
    });
    return absl::OkStatus();
  }
  void AddWeightGradient(const LinearOp& op) const {
    const int64_t rows = in.Rows(op.input), inputs = in.Columns(op.input);
    const int64_t outputs = in.Columns(number + kFirstOpValue);
    const Tensor& input = Value(op.input);
    if (float* d_weight = Gradient(op.weight); d_weight != nullptr) {
      DenseProduct product{.rows = outputs,
                           .columns = inputs,
                           .depth = rows,
                           .operand = in.module_.element(),
                           .a = {Out().data, Out().element, outputs},
                           .a_order = DenseOrder::kDepth,
                           .b = {input.data, input.element, inputs},
                           .b_order = DenseOrder::kDepth,
                           .result = DenseResult::kAddBlocks,
                           .c = d_weight};
      if (op.transposed) {
        std::swap(product.rows, product.columns);
        std::swap(product.a, product.b);
      }
      workers().Run(product);
    }
    if (float* d_bias = Gradient(op.bias); d_bias != nullptr) {
      const ColumnSum sum{Out(), in.module_.element(), rows, outputs, d_bias};
      workers().ForRanges(outputs, kSumColumns,
                          [&](IndexRange columns) { AddColumnSums(sum, columns); });
    }
  }
  absl::Status operator()(const NormOp& op) const {
    const NormOperands norm = in.NormOf(op);
    const int64_t rows = in.Rows(op.input);
    auto* statistics = reinterpret_cast<NormStatistics*>(in.module_.statistics());
    Add(op.input, [&](const Tensor& place, bool add) {
      workers().ForRows(rows, norm.count, [&](IndexRange range) {
        NormBackward(norm, Out(), place, add, statistics, range);
      });
    });
    const NormGradients sums{.dy = Out(),
                             .statistics = statistics,
                             .vectors = rows,
                             .d_weight = Gradient(op.weight),
                             .d_bias = Gradient(op.bias)};
    if (sums.d_weight == nullptr && sums.d_bias == nullptr) return absl::OkStatus();
    workers().ForRanges(norm.count, kSumColumns,
                        [&](IndexRange columns) { AddNormGradients(norm, sums, columns); });
    return absl::OkStatus();
  }
  absl::Status operator()(const AttentionOp& op) const {
    const auto buffer = [&](BufferUse use) { return in.Buffer(use, number); };
    HeadGradients heads{.q = buffer(BufferUse::kQueryGradient),
                        .k = buffer(BufferUse::kKeyGradient),
                        .v = buffer(BufferUse::kValueGradient)};
    RETURN_IF_ERROR(
        AttentionRun(in.module_, in.call_, in.layer_, number, in.values_)
            .Backward({buffer(BufferUse::kBackwardQuery), buffer(BufferUse::kBackwardKey)}, Out(),
                      adds, heads));
    AddHeads(op.v, heads.v);
    AddHeads(op.k, heads.k);
    AddHeads(op.q, heads.q);
    return absl::OkStatus();
  }
  // Columns that no use names are 0.
  void AddHeads(const HeadColumns& heads, const std::byte* from) const {
    const Tensor& place = gradients.values[heads.value];
    const int64_t columns = in.Columns(heads.value);
    const bool is_whole = heads.columns() == columns;
    Add(heads.value, [&](const Tensor&, bool is_set) {
      if (!is_set && !is_whole) {
        std::memset(place.data, 0, in.Count(heads.value) * ElementBytes(place.element));
      }
      workers().ForRows(in.Rows(heads.value), heads.columns(), [&](IndexRange rows) {
        CopyColumns({from, in.module_.element()}, {heads.columns(), 0}, place,
                    {columns, heads.first_column}, heads.columns(), is_set || !is_whole, rows);
      });
    });
  }
  absl::Status operator()(const ActivationOp& op) const {
    Add(op.input, [&](const Tensor& place, bool add) {
      workers().ForNumbers(in.Count(op.input), [&](IndexRange numbers) {
        ApplyCurveSlope(CurveOf(op.kind), Value(op.input), Out(), place, add, numbers);
      });
    });
    return absl::OkStatus();
  }
  absl::Status operator()(const BinaryOp& op) const {
    if (op.kind == BinaryKind::kMultiply) {
      AddNumbers(op.b, Combination::kProduct, op.b_scale, op.a);
      AddNumbers(op.a, Combination::kProduct, op.b_scale, op.b);
    } else {
      AddNumbers(op.b, Combination::kScaled, op.b_scale, op.b);
      AddNumbers(op.a, Combination::kScaled, 1, op.a);
    }
    return absl::OkStatus();
  }
  absl::Status operator()(const DropoutOp& op) const {
    const DropoutRule rule = in.RuleOf(op, number);
    const int64_t columns = in.Columns(op.input);
    Add(op.input, [&](const Tensor& place, bool add) {
      workers().ForRows(in.Rows(op.input), columns,
                        [&](IndexRange rows) { DropRows(rule, columns, Out(), place, add, rows); });
    });
    return absl::OkStatus();
  }
};

absl::Status LayerRun::Backward(int64_t op, bool adds, LayerGradients& gradients) const {
  return std::visit(BackwardOp{*this, op, adds, gradients},
                    module_.graph().BlockOf(layer_).ops[op].kind);
}

}  // namespace attnd
