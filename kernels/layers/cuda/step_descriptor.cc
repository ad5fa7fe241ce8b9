#include "kernels/layers/cuda/step_descriptor.h"

namespace attnd {

StepDesc StepDescOf(const ModuleDevice::WeightStep& of, const DenseTensor& packed,
                    int32_t first_block) {
  const EntryStep& step = of.step;
  const OptimizerSpec& spec = *step.spec;
  const StepScalars& s = step.scalars;
  return {.gradient = of.gradient,
          .parameter = step.parameter,
          .packed = packed,
          .first = step.moments[0],
          .second = step.moments[1],
          .second_max = step.moments[2],
          .count = step.count,
          .first_block = first_block,
          .is_adam = spec.kind == OptimizerKind::kAdamW,
          .is_coupled = spec.coupled_decay,
          .is_amsgrad = spec.amsgrad,
          .is_nesterov = spec.nesterov,
          .is_first = s.is_first,
          .multiplier = s.multiplier,
          .decay = s.decay,
          .rate = s.rate,
          .momentum = s.momentum,
          .gain = s.gain,
          .toward1 = s.toward1,
          .keep2 = s.keep2,
          .toward2 = s.toward2,
          .root_correction = s.root_correction,
          .epsilon = s.epsilon};
}

}  // namespace attnd
