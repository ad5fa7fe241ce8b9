#include "modules/optimizer_step.h"

#include "base/check.h"

namespace attnd {

bool IsApplied(const ModuleDescription& module, const StepCall& call, const GradientStats& stats) {
  if (module.optimizer.kind == OptimizerKind::kNone) return false;
  return stats.is_finite || !call.skip_unless_finite;
}

OptimizerStep::OptimizerStep(const ModuleDescription& module, const StepCall& call,
                             const GradientStats& stats, int64_t step)
    : module_(module), call_(call) {
  for (const ParameterStep& of : call.parameters) {
    const StepValues& values = call.values[of.values];
    scalars_.push_back(ScalarsOf(values.spec, values.rates, of.step, of.multiplier));
  }
  if (!scalars_.empty()) return;
  const double clip = ClipFactor(stats.squared_norm, call.multiplier, call.max_norm);
  for (const GroupRates& rates : call.groups) {
    scalars_.push_back(ScalarsOf(module.optimizer, rates, step, call.multiplier * clip));
  }
}

bool OptimizerStep::Skips(int64_t entry) const {
  if (!module_.table.entries()[entry].trained_offset.has_value()) return true;
  return !call_.parameters.empty() && call_.parameters[entry].step == 0;
}

int64_t OptimizerStep::IndexOf(int64_t entry) const {
  return call_.parameters.empty() ? module_.optimizer.GroupOf(entry) : entry;
}

EntryStep OptimizerStep::Of(int64_t entry, const OptimizerTensors& tensors) const {
  const WeightEntry& of = module_.table.entries()[entry];
  CHECK(of.trained_offset.has_value()) << entry;
  const int64_t index = IndexOf(entry);
  CHECK(index < static_cast<int64_t>(scalars_.size())) << index;
  const OptimizerSpec& spec = call_.parameters.empty()
                                  ? module_.optimizer
                                  : call_.values[call_.parameters[entry].values].spec;
  EntryStep step{.spec = &spec,
                 .scalars = scalars_[index],
                 .count = of.elements,
                 .gradient = tensors.gradients + *of.trained_offset,
                 .parameter = tensors.weights + of.offset};
  for (int64_t n = 0; n < spec.MomentCount(); ++n) {
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
