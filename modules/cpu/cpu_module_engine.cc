#include "modules/cpu/cpu_module_engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "modules/cpu/cpu_instance.h"
#include "modules/cpu/workers.h"

namespace attnd {
namespace {

class CpuModuleEngine : public ModuleEngine {
 public:
  CpuModuleEngine(int threads, Backend& attention)
      : workers_(threads > 0 ? threads : AvailableCpus()), attention_(attention) {}

  std::string Name() const override { return "cpu"; }
  absl::Status Supports(const ModuleGraph&) const override { return absl::OkStatus(); }

  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  int64_t budget) const override {
    // What recomputation saves leaves the engine's own bytes as they are, or nearly: a plan for
    // what is left of the budget, until both fit.
    EnginePlan plan;
    for (int64_t left = budget;;) {
      ASSIGN_OR_RETURN(plan.plan,
                       MakePlan(module.graph, module.table, module.optimizer, limits, left));
      const CpuLayout layout(module, limits, plan.plan, attention_);
      plan.engine_bytes = layout.bytes - plan.plan.bytes();
      if (plan.bytes() <= budget) return plan;
      left = std::min(left - 1, budget - plan.engine_bytes);
    }
  }

  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override {
    return CpuInstance::Make(std::move(module), limits, plan, workers_, attention_);
  }

 private:
  Workers workers_;
  Backend& attention_;
};

}  // namespace

std::unique_ptr<ModuleEngine> MakeCpuModuleEngine(int threads, Backend& attention) {
  return std::make_unique<CpuModuleEngine>(threads, attention);
}

}  // namespace attnd
