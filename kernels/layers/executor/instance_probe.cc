#include "kernels/layers/executor/instance_probe.h"

#include <algorithm>
#include <variant>

#include "attention/random_problem.h"
#include "base/status_macros.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

constexpr int64_t kPatternNumbers = int64_t{1} << 16;
constexpr double kWeightScale = 0.02;

// One sequence of as many rows as a call may have, and a kept one.
CallRows RowsOf(const ModuleLimits& limits) {
  const bool trains = limits.kept_rows > 0;
  const auto most = [trains](int64_t of_call, int64_t kept) {
    return trains ? std::min(of_call, kept) : of_call;
  };
  CallRows rows{.batch = 1, .length = most(limits.max_rows, limits.kept_rows)};
  if (limits.max_memory_rows > 0) {
    rows.memory_length = most(limits.max_memory_rows, limits.kept_memory_rows);
  }
  return rows;
}

// Sets `bytes` at `to` to normal numbers of this element.
absl::Status FillWith(ModuleDevice& device, ElementType element, double scale, std::byte* to,
                      int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  Random random(1);
  const int64_t size = ElementBytes(element);
  std::vector<std::byte> pattern(kPatternNumbers * size);
  for (int64_t n = 0; n < kPatternNumbers; ++n) {
    StoreElement(element, pattern.data(), n, static_cast<float>(scale * random.Normal()));
  }
  int64_t filled = std::min(bytes, kPatternNumbers * size);
  RETURN_IF_ERROR(device.Put(element, pattern.data(), {to, element}, filled / size));
  for (; filled < bytes; filled = std::min(bytes, 2 * filled)) {
    device.Copy(to, to + filled, std::min(filled, bytes - filled));
  }
  return device.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<InstanceProbe>> InstanceProbe::Make(ExecutorInstance& instance) {
  auto probe = std::unique_ptr<InstanceProbe>(new InstanceProbe(instance));
  RETURN_IF_ERROR(probe->Fill());
  return probe;
}

InstanceProbe::InstanceProbe(ExecutorInstance& instance)
    : instance_(instance),
      kept_(instance.module_->graph, instance.plan_.plan.recompute, RowsOf(instance.limits_),
            {0, instance.Layers()}) {
  const InstanceTensors& tensors = instance.tensors_;
  kept_.call = {.rows = RowsOf(instance.limits_),
                .dropout = {.is_training = trains(), .seed = 1},
                .memory = {tensors.memory(), tensors.element()}};
  kept_.call.positions = kept_.call.rows.ResolvedPositions();
}

absl::Status InstanceProbe::Fill() const {
  const InstanceLayout& layout = instance_.layout_;
  const ModuleLayout& module = graph().layout();
  ModuleDevice& device = *instance_.device_;
  std::byte* memory = instance_.tensors_.activations() - layout.activations_at;
  const auto fill = [&](ElementType element, double scale, int64_t at, int64_t end) {
    return FillWith(device, element, scale, memory + at, end - at);
  };
  RETURN_IF_ERROR(
      fill(module.parameter_element, kWeightScale, layout.weights_at, layout.packed_at));
  const int64_t packed_end = trains() ? layout.gradients_at : layout.activations_at;
  RETURN_IF_ERROR(fill(module.element, kWeightScale, layout.packed_at, packed_end));
  if (trains()) {
    RETURN_IF_ERROR(
        fill(module.element, 1, layout.activations_at,
             layout.activations_at + std::min(kept_.places.bytes, layout.activation_bytes)));
  }
  return fill(module.element, 1, layout.boundaries_at, layout.attention_at);
}

absl::Status InstanceProbe::Clear() const {
  const InstanceLayout& layout = instance_.layout_;
  std::byte* memory = instance_.tensors_.activations() - layout.activations_at;
  instance_.device_->SetZero(memory, layout.attention_at);
  return instance_.device_->Finish();
}

absl::Status InstanceProbe::Run(int64_t block, Direction direction,
                                absl::Span<const OpSegment> segments, int times) const {
  const std::vector<ModuleLayer>& layers = graph().layout().layers;
  const auto layer = std::find_if(layers.begin(), layers.end(),
                                  [&](const auto& of) { return of.block == block; }) -
                     layers.begin();
  const bool is_forward = direction == Direction::kForward;
  for (int n = 0; n < times; ++n) {
    for (size_t at = 0; at < segments.size(); ++at) {
      RETURN_IF_ERROR(is_forward ? RunForward(layer, segments[at])
                                 : RunBackward(layer, segments[segments.size() - 1 - at]));
    }
  }
  return instance_.device_->Finish();
}

bool InstanceProbe::IsAttention(int64_t layer, const OpSegment& segment) const {
  const OpOrder& order = instance_.blocks_[graph().layout().layers[layer].block].order;
  return std::holds_alternative<AttentionOp>(
      graph().BlockOf(layer).ops[order.ops[segment.first]].kind);
}

absl::Status InstanceProbe::RunForward(int64_t layer, const OpSegment& segment) const {
  if (IsAttention(layer, segment)) return instance_.device_->Finish();
  const int64_t block = graph().layout().layers[layer].block;
  LayerValues values = instance_.ForwardValues(layer, kept_.call, 0, KeptOrNull());
  values.values.back() = instance_.InputOf(layer + 1, nullptr);
  return LayerRun(instance_.tensors_, kept_.call, layer, instance_.schedules_.forward[block],
                  values)
      .Forward(segment, instance_.blocks_[block].order, trains());
}

absl::Status InstanceProbe::RunBackward(int64_t layer, const OpSegment& segment) const {
  if (IsAttention(layer, segment)) return absl::OkStatus();
  const OpOrder& order = instance_.blocks_[graph().layout().layers[layer].block].order;
  auto [again, values, gradients] = instance_.BackwardTensorsOf(layer, kept_);
  // The ops behind it have given their shares.
  for (size_t place = segment.end; place < order.ops.size(); ++place) {
    for (const ValueUse& use : ValuesOf(graph().BlockOf(layer).ops[order.ops[place]])) {
      gradients.is_set[use.value] = true;
    }
  }
  return LayerRun(instance_.tensors_, kept_.call, layer, instance_.schedules_.backward[layer],
                  values)
      .Backward(segment, order, /*adds=*/true, gradients);
}

}  // namespace attnd
