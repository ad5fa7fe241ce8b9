#include "kernels/layers/executor/layer_run.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "base/check.h"
#include "base/status_macros.h"
#include "modules/attention_problem.h"

namespace attnd {
namespace {

static_assert(static_cast<int>(Curve::kRelu) == static_cast<int>(ActivationKind::kRelu) &&
              static_cast<int>(Curve::kTanh) == static_cast<int>(ActivationKind::kTanh));
Curve CurveOf(ActivationKind kind) { return static_cast<Curve>(kind); }

}  // namespace

std::byte* LayerRun::Buffer(BufferUse use, int64_t number) const {
  const int64_t at = places_.At(use, number);
  return at < 0 ? nullptr : module_.layer_buffers() + at;
}

// Values by weights, or gradients by weights: a, the bias and c are the caller's.
WeightProduct LayerRun::ProductOf(const LinearOp& op, bool is_forward) const {
  return {.rows = Rows(op.input),
          .weight = module_.Matrix(layer_, op.weight),
          .is_transposed = is_forward != op.transposed};
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
          .offset = SiteOffset(DropoutSite(module_.graph().first_layer() + layer_, number),
                               call_.dropout.offset),
          .threshold = call_.dropout.is_training ? op.threshold : 0,
          .first_row = call_.rows.first_row};
}

// ---- Segments.

// `tensors`: by value, where the segment writes.
template <class RunOps>
absl::Status LayerRun::InSegment(const OpSegment& segment, const std::vector<int64_t>& unread,
                                 const std::vector<Tensor>& tensors, const RunOps& run_ops) const {
  if (segment.of == SegmentTemplate::kOp) return run_ops();
  std::vector<const void*> data;
  for (int64_t value : unread) data.push_back(tensors[value].data);
  module_.device().BeginSegment(data);
  const absl::Status status = run_ops();
  module_.device().EndSegment();
  return status;
}

absl::Status LayerRun::Forward(const OpSegment& segment, const OpOrder& order, bool is_kept) const {
  const std::vector<int64_t>& unread = is_kept ? segment.unread : segment.unread_alone;
  return InSegment(segment, unread, values_.values, [&] {
    absl::Status status;
    for (int64_t place = segment.first; place < segment.end && status.ok(); ++place) {
      status = Forward(order.ops[place]);
    }
    return status;
  });
}

absl::Status LayerRun::Backward(const OpSegment& segment, const OpOrder& order, bool adds,
                                LayerGradients& gradients) const {
  return InSegment(segment, segment.unread, gradients.values, [&] {
    absl::Status status;
    for (int64_t place = segment.end - 1; place >= segment.first && status.ok(); --place) {
      status = Backward(order.ops[place], adds, gradients);
    }
    return status;
  });
}

// ---- Forward.

struct LayerRun::ForwardOp {
  const LayerRun& in;
  const int64_t number;

  const Tensor& Value(int64_t value) const { return in.values_.values[value]; }
  const Tensor& Out() const { return Value(number + kFirstOpValue); }
  int64_t Count() const { return in.Count(number + kFirstOpValue); }
  ModuleDevice& device() const { return in.module_.device(); }

  absl::Status operator()(std::monostate) const { return absl::OkStatus(); }
  absl::Status operator()(const LinearOp& op) const {
    WeightProduct product = in.ProductOf(op, true);
    product.a = Value(op.input);
    product.bias = in.module_.WeightOrNull(in.layer_, op.bias);
    product.c = Out();
    device().Multiply(product);
    return absl::OkStatus();
  }
  absl::Status operator()(const NormOp& op) const {
    device().Norm(in.NormOf(op), Out(), in.Rows(op.input));
    return absl::OkStatus();
  }
  absl::Status operator()(const AttentionOp&) const {
    return AttentionRun(in.module_, in.call_, in.layer_, number, in.values_)
        .Forward(
            {in.Buffer(BufferUse::kTurnedQuery, number), in.Buffer(BufferUse::kTurnedKey, number)});
  }
  absl::Status operator()(const ActivationOp& op) const {
    device().ApplyCurve(CurveOf(op.kind), Value(op.input), Out(), Count());
    return absl::OkStatus();
  }
  absl::Status operator()(const BinaryOp& op) const {
    const bool is_product = op.kind == BinaryKind::kMultiply;
    device().Combine(is_product ? Combination::kProduct : Combination::kSum, Value(op.a),
                     op.b_scale, Value(op.b), Out(), false, Count());
    return absl::OkStatus();
  }
  absl::Status operator()(const DropoutOp& op) const {
    device().Drop(in.RuleOf(op, number), Value(op.input), Out(), false, in.Rows(op.input),
                  in.Columns(op.input));
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
  ModuleDevice& device() const { return in.module_.device(); }
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
      if (place.data == Out().data) return;  // GradientHolders
      device().Combine(kind, Out(), scale, kind == Combination::kScaled ? Out() : Value(other),
                       place, add, in.Count(value));
    });
  }

  absl::Status operator()(std::monostate) const { return absl::OkStatus(); }
  absl::Status operator()(const LinearOp& op) const {
    AddWeightGradient(op);
    WeightProduct product = in.ProductOf(op, false);
    product.a = Out();
    Add(op.input, [&](const Tensor& place, bool add) {
      product.c = place;
      product.add = add;
      device().Multiply(product);
    });
    return absl::OkStatus();
  }
  void AddWeightGradient(const LinearOp& op) const {
    const int64_t rows = in.Rows(op.input), inputs = in.Columns(op.input);
    const int64_t outputs = in.Columns(number + kFirstOpValue);
    float* d_bias = Gradient(op.bias);
    if (float* d_weight = Gradient(op.weight); d_weight != nullptr) {
      GradientProduct product{.rows = rows,
                              .a = Out(),
                              .b = Value(op.input),
                              .a_columns = outputs,
                              .b_columns = inputs,
                              .operand = in.module_.element(),
                              .sums = d_weight};
      if (op.transposed) {
        std::swap(product.a, product.b);
        std::swap(product.a_columns, product.b_columns);
      } else {
        product.column_sums = std::exchange(d_bias, nullptr);
      }
      device().AddGradient(product);
    }
    if (d_bias != nullptr) {
      device().AddColumnSums({Out(), in.module_.element(), rows, outputs, d_bias});
    }
  }
  absl::Status operator()(const NormOp& op) const {
    const NormOperands norm = in.NormOf(op);
    const int64_t rows = in.Rows(op.input);
    auto* statistics = reinterpret_cast<NormStatistics*>(in.module_.statistics());
    Add(op.input, [&](const Tensor& place, bool add) {
      device().NormBackward(norm, Out(), place, add, statistics, rows);
    });
    const NormGradients sums{.dy = Out(),
                             .statistics = statistics,
                             .vectors = rows,
                             .d_weight = Gradient(op.weight),
                             .d_bias = Gradient(op.bias)};
    if (sums.d_weight != nullptr || sums.d_bias != nullptr) device().AddNormGradients(norm, sums);
    return absl::OkStatus();
  }
  absl::Status operator()(const AttentionOp& op) const {
    const auto buffer = [&](BufferUse use) { return in.Buffer(use, number); };
    const TurnedBuffers turned = {buffer(BufferUse::kBackwardQuery),
                                  buffer(BufferUse::kBackwardKey)};
    const AttentionRun run(in.module_, in.call_, in.layer_, number, in.values_);
    if (AreColumnsOfOne(op)) {
      HeadGradients columns = ColumnsOf(op, gradients.values[op.q.value]);
      gradients.is_set[op.q.value] = true;
      return run.Backward(turned, Out(), adds, columns);
    }
    // As attention leaves them they may be the values' gradients, unless a norm comes behind.
    HeadGradients heads{
        .q = PlaceOf(op, op.q, op.q_norm.has_value(), buffer(BufferUse::kQueryGradient)),
        .k = PlaceOf(op, op.k, op.k_norm.has_value(), buffer(BufferUse::kKeyGradient)),
        .v = PlaceOf(op, op.v, false, buffer(BufferUse::kValueGradient))};
    RETURN_IF_ERROR(run.Backward(turned, Out(), adds, heads));
    AddHeads(op.v, heads.v);
    AddHeads(op.k, heads.k);
    AddHeads(op.q, heads.q);
    return absl::OkStatus();
  }
  // Whether q, k and v are all columns of one value, and attention may write their gradients into
  // its own: no use has given its share, and nothing comes between.
  bool AreColumnsOfOne(const AttentionOp& op) const {
    const int64_t value = op.q.value, columns = in.Columns(value);
    const Tensor& place = gradients.values[value];
    const int64_t chunk = device().AttendedChunk();
    if (chunk == 0 || columns % chunk != 0 || gradients.is_set[value] || op.k.value != value ||
        op.v.value != value || op.q_norm.has_value() || op.k_norm.has_value() ||
        op.rotary.has_value() || place.element != in.module_.element() ||
        reinterpret_cast<uintptr_t>(place.data) % kTensorAlignment != 0 ||
        !in.call_.rows.kv_lengths.empty()) {
      return false;
    }
    std::array<const HeadColumns*, 3> heads = {&op.q, &op.k, &op.v};
    std::sort(heads.begin(), heads.end(), [](const HeadColumns* a, const HeadColumns* b) {
      return a->first_column < b->first_column;
    });
    int64_t next = 0;
    for (const HeadColumns* of : heads) {
      if (of->first_column != next || next % chunk != 0 || of->dim % chunk != 0) return false;
      next += of->columns();
    }
    return next == columns;
  }
  HeadGradients ColumnsOf(const AttentionOp& op, const Tensor& place) const {
    const int64_t bytes = ElementBytes(place.element);
    const auto at = [&](const HeadColumns& heads) {
      return static_cast<std::byte*>(place.data) + heads.first_column * bytes;
    };
    const int64_t stride = in.Columns(op.q.value) * bytes / 2;
    return {at(op.q), at(op.k), at(op.v), {stride, stride, stride}};
  }
  // Where attention writes the gradient of heads: the value's own, if these heads alone are all of
  // it and no use has given its share.
  std::byte* PlaceOf(const AttentionOp& op, const HeadColumns& heads, bool has_norm,
                     std::byte* buffer) const {
    const Tensor& place = gradients.values[heads.value];
    int uses = 0;
    for (const HeadColumns* of : {&op.q, &op.k, &op.v}) uses += of->value == heads.value ? 1 : 0;
    const bool is_own = !has_norm && uses == 1 && !gradients.is_set[heads.value] &&
                        heads.columns() == in.Columns(heads.value) &&
                        place.element == in.module_.element() &&
                        reinterpret_cast<uintptr_t>(place.data) % kTensorAlignment == 0;
    return is_own ? static_cast<std::byte*>(place.data) : buffer;
  }
  // Columns that no use names are 0.
  void AddHeads(const HeadColumns& heads, const std::byte* from) const {
    const Tensor& place = gradients.values[heads.value];
    if (from == place.data) {
      gradients.is_set[heads.value] = true;
      return;
    }
    const int64_t columns = in.Columns(heads.value);
    const bool is_whole = heads.columns() == columns;
    Add(heads.value, [&](const Tensor&, bool is_set) {
      if (!is_set && !is_whole) {
        device().SetZero(place.data, in.Count(heads.value) * ElementBytes(place.element));
      }
      device().CopyColumns({from, in.module_.element()}, {heads.columns(), 0}, place,
                           {columns, heads.first_column}, is_set || !is_whole, in.Rows(heads.value),
                           heads.columns());
    });
  }
  absl::Status operator()(const ActivationOp& op) const {
    Add(op.input, [&](const Tensor& place, bool add) {
      device().ApplyCurveSlope(CurveOf(op.kind), Value(op.input), Out(), place, add,
                               in.Count(op.input));
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
    Add(op.input, [&](const Tensor& place, bool add) {
      device().Drop(in.RuleOf(op, number), Out(), place, add, in.Rows(op.input),
                    in.Columns(op.input));
    });
    return absl::OkStatus();
  }
};

absl::Status LayerRun::Backward(int64_t op, bool adds, LayerGradients& gradients) const {
  return std::visit(BackwardOp{*this, op, adds, gradients},
                    module_.graph().BlockOf(layer_).ops[op].kind);
}

}  // namespace attnd
