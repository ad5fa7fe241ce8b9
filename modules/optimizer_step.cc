#include "modules/optimizer_step.h"

#include "base/check.h"

namespace attnd {

bool IsApplied(const ModuleDescription& module, const StepCall& call, const GradientStats& stats) {
  if (module.optimizer.kind == OptimizerKind::kNone) return false;
  return stats.is_finite || !call.skip_unless_finite;
}

OptimizerStep::OptimizerStep(const ModuleDescription& module, const StepCall& call,
                             const GradientStats& stats, int64_t step)
    : module_(module) {
  const double clip = ClipFactor(stats.squared_norm, call.multiplier, call.max_norm);
  for (const GroupRates& rates : call.groups) {
    scalars_.push_back(ScalarsOf(module.optimizer, rates, step, call.multiplier * clip));
  }
}

EntryStep OptimizerStep::Of(int64_t entry, const OptimizerTensors& tensors) const {
  const WeightEntry& of = module_.table.entries()[entry];
  CHECK(of.trained_offset.has_value()) << entry;
  const int64_t group = module_.optimizer.GroupOf(entry);
  CHECK(group < static_cast<int64_t>(scalars_.size())) << group;
  EntryStep step{.spec = &module_.optimizer,
                 .scalars = scalars_[group],
                 .count = of.elements,
                 .gradient = tensors.gradients + *of.trained_offset,
                 .parameter = tensors.weights + of.offset};
  for (int64_t n = 0; n < module_.optimizer.MomentCount(); ++n) {
    step.moments[n] = tensors.moments[n] + *of.trained_offset;
  }
  return step;
}

void EntryStep::Apply(int64_t first, int64_t size) const {
  const auto moment = [&](int n) {
    return moments[n] != nullptr ? absl::Span<float>(moments[n] + first, size)
                                 : absl::Span<float>();
  };
  ApplyStep(*spec, scalars, {gradient + first, static_cast<size_t>(size)},
            {parameter + first, static_cast<size_t>(size)}, {moment(0), moment(1), moment(2)});
}

}  // namespace attnd
