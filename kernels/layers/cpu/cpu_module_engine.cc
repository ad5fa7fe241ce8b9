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
  CpuModuleEngine(int threads, std::unique_ptr<Backend> attention)
      : CpuModuleEngine(threads, *attention) {
    own_attention_ = std::move(attention);
  }

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
  std::unique_ptr<Backend> own_attention_;  // or null
};

}  // namespace

std::unique_ptr<ModuleEngine> MakeCpuModuleEngine(int threads, Backend& attention) {
  return std::make_unique<CpuModuleEngine>(threads, attention);
}

Device CpuDeviceOf(const CpuBackendOptions& options) {
  return {MakeCpuBackend(options), [options](const HoldDeviceMemory&) {
            CpuBackendOptions of_modules = options;
            of_modules.priority = ThreadPool::Priority::kBackground;
            return std::make_unique<CpuModuleEngine>(options.threads, MakeCpuBackend(of_modules));
          }};
}

}  // namespace attnd
