// ReferenceEngine: ModuleReference, with the contract's rounding, as an engine of modules. For
// tests: float64 on one thread, memory from the heap as calls need it.
#pragma once

#include "modules/module_engine.h"

namespace attnd {

class ReferenceEngine : public ModuleEngine {
 public:
  std::string Name() const override { return "reference"; }
  absl::Status Supports(const ModuleGraph&) const override { return absl::OkStatus(); }
  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  const MemoryBudget& budget) const override;
  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override;
};

}  // namespace attnd
