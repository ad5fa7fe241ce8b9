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

// One entry's step: ApplyStep's arguments, wherever the tensors lie. Entries share nothing, so cuts
// change no bit.
struct EntryStep {
  const OptimizerSpec* spec = nullptr;
  StepScalars scalars = {};
  int64_t count = 0;
  const float* gradient = nullptr;
  float* parameter = nullptr;
  std::array<float*, 3> moments = {};  // null: the optimizer does not have it

  void Apply(int64_t first, int64_t size) const;
  void Apply() const { Apply(0, count); }
};

// Not where nothing is trained by an optimizer, nor where the call wants finite gradients.
bool IsApplied(const ModuleDescription& module, const StepCall& call, const GradientStats& stats);

class OptimizerStep {
 public:
  // `step` is t, from 1. The module and the call outlive the object.
  OptimizerStep(const ModuleDescription& module, const StepCall& call, const GradientStats& stats,
                int64_t step);

  // The step of an entry that is trained and not skipped.
  EntryStep Of(int64_t entry, const OptimizerTensors& tensors) const;
  // It is frozen, or the call leaves it as it is.
  bool Skips(int64_t entry) const;

 private:
  int64_t IndexOf(int64_t entry) const;

  const ModuleDescription& module_;
  const StepCall& call_;
  std::vector<StepScalars> scalars_;  // of each group, or of each entry where the call has them
};

}  // namespace attnd
