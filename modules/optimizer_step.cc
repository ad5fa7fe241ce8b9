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

void OptimizerStep::Apply(int64_t entry, int64_t first, int64_t count,
                          const OptimizerTensors& tensors) const {
  const WeightEntry& of = module_.table.entries()[entry];
  if (!of.trained_offset.has_value()) return;
  const int64_t group = module_.optimizer.GroupOf(entry);
  CHECK(group < static_cast<int64_t>(scalars_.size())) << group;
  const size_t size = static_cast<size_t>(count);
  const int64_t trained = *of.trained_offset + first;
  const int64_t moment_count = module_.optimizer.MomentCount();
  const auto moment = [&](int64_t n) {
    return n < moment_count ? absl::Span<float>(tensors.moments[n] + trained, size)
                            : absl::Span<float>();
  };
  ApplyStep(module_.optimizer, scalars_[group], {tensors.gradients + trained, size},
            {tensors.weights + of.offset + first, size}, {moment(0), moment(1), moment(2)});
}

}  // namespace attnd
