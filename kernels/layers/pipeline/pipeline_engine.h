// PipelineEngine: several devices as one engine of modules, each with an engine of its own. A
// module that fits one device lies there; else it is cut into ranges of consecutive layers, one
// instance of its device's engine each. Rows pass from range to range through host memory.
//
// Placement  where layers wish for devices, those, if the module fits them so. Else one device,
//            that with the most room, even if its layers then compute activations again. Else the
//            fewest on which it fits, those with the most room, in the order of their numbers, with
//            ranges in proportion to the room. All of one architecture.
// Memory     the devices' as each engine says; BorderBytes of the host's.
// Results    those of one of the devices, bit for bit.
// Threads    as ModuleEngine: an instance computes one call at a time, range after range.
// Errors     as ModuleEngine; what fits nowhere is OUT_OF_RANGE with what each device has.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/layers/pipeline/pipeline_device.h"
#include "modules/module_engine.h"

namespace attnd {

class PipelineEngine : public ModuleEngine {
 public:
  // At least one. Budgets, plans and wishes count devices in this order.
  explicit PipelineEngine(std::vector<PipelineDevice> devices) : devices_(std::move(devices)) {}

  std::string Name() const override { return devices_.front().engine->Name(); }
  // Whether any device does; modules go to those alone.
  absl::Status Supports(const ModuleGraph& graph) const override;
  int ReplicaVersion(const EnginePlan& plan) const override;
  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  const MemoryBudget& budget) const override;
  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override;
  SearchTotals Searches() const override;  // of all devices

 private:
  const std::vector<PipelineDevice> devices_;
};

}  // namespace attnd
