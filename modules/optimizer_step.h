// OptimizerStep: one step of a module's optimizer, tensor by tensor. Any thread may apply an entry;
// entries share nothing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "modules/module_engine.h"

namespace attnd {

// Each as the weight table lays it out; moments that the optimizer does not have are not looked at.
struct OptimizerTensors {
  float* weights = nullptr;
  const float* gradients = nullptr;
  std::array<float*, 3> moments = {};
};

// Not where nothing is trained by an optimizer, nor where the call wants finite gradients.
bool IsApplied(const ModuleDescription& module, const StepCall& call, const GradientStats& stats);

class OptimizerStep {
 public:
  // `step` is t, from 1. The module outlives the object.
  OptimizerStep(const ModuleDescription& module, const StepCall& call, const GradientStats& stats,
                int64_t step);

  // Numbers [first, first + count) of an entry: cuts change no bit. A frozen entry is left alone.
  void Apply(int64_t entry, int64_t first, int64_t count, const OptimizerTensors& tensors) const;
  void Apply(int64_t entry, const OptimizerTensors& tensors) const {
    Apply(entry, 0, module_.table.entries()[entry].elements, tensors);
  }

 private:
  const ModuleDescription& module_;
  std::vector<StepScalars> scalars_;  // of each group
};

}  // namespace attnd
