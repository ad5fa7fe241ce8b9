#include "kernels/layers/cpu/cpu_module_engine.h"

#include <utility>

#include "base/cpu_quota.h"
#include "kernels/layers/cpu/cpu_device.h"
#include "kernels/layers/cpu/workers.h"
#include "kernels/layers/executor/executor_instance.h"

namespace attnd {
namespace {

class CpuModuleEngine : public ModuleEngine {
 public:
  CpuModuleEngine(int threads, Backend& attention)
      : workers_(threads > 0 ? threads : AvailableCpus()), attention_(attention) {}

  std::string Name() const override { return "cpu"; }
  absl::Status Supports(const ModuleGraph&) const override { return absl::OkStatus(); }

  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  const MemoryBudget& budget) const override {
    const CpuDevice device(workers_, attention_);
    return ExecutorInstance::Plan(module, limits, budget.OnDevice(0), device);
  }

  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override {
    return ExecutorInstance::Make(std::move(module), limits, plan,
                                  std::make_unique<CpuDevice>(workers_, attention_));
  }

 private:
  mutable Workers workers_;  // a plan's device runs nothing
  Backend& attention_;
};

}  // namespace

std::unique_ptr<ModuleEngine> MakeCpuModuleEngine(int threads, Backend& attention) {
  return std::make_unique<CpuModuleEngine>(threads, attention);
}

Device CpuDeviceOf(std::unique_ptr<Backend> attention, int threads) {
  Backend& engine = *attention;
  return {std::move(attention), [threads, &engine](const HoldDeviceMemory&) {
            return MakeCpuModuleEngine(threads, engine);
          }};
}

}  // namespace attnd
