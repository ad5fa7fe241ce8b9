#include "kernels/layers/pipeline/pipeline_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/layers/pipeline/layer_placement.h"
#include "kernels/layers/pipeline/pipeline_instance.h"

namespace attnd {
namespace {

absl::Status TooLarge(const absl::Status& on_one, const std::vector<PipelineDevice>& devices,
                      const MemoryBudget& budget) {
  std::string text(on_one.message());
  absl::StrAppend(&text, "; cut between layers it does not fit either:");
  for (size_t n = 0; n < devices.size(); ++n) {
    absl::StrAppend(&text, n > 0 ? ", " : " ", devices[n].name, " has ", budget.OnDevice(n),
                    " bytes");
  }
  return absl::OutOfRangeError(text);
}

}  // namespace

absl::Status PipelineEngine::Supports(const ModuleGraph& graph) const {
  absl::Status first;
  for (const PipelineDevice& device : devices_) {
    absl::Status status = device.engine->Supports(graph);
    if (status.ok()) return status;
    if (first.ok()) first = std::move(status);
  }
  return first;
}

int PipelineEngine::ReplicaVersion(const EnginePlan& plan) const {
  return plan.ranges.empty() ? devices_[plan.device].engine->ReplicaVersion(plan) : 0;
}

absl::StatusOr<EnginePlan> PipelineEngine::Plan(const ModuleDescription& module,
                                                const ModuleLimits& limits,
                                                const MemoryBudget& budget) const {
  const LayerPlacement placement(devices_, module, limits, budget);
  const std::vector<std::vector<int>>& groups = placement.groups();
  if (groups.empty()) return Supports(module.graph);
  if (std::optional<EnginePlan> wished = placement.AsWished()) return *std::move(wished);
  absl::StatusOr<EnginePlan> on_one = placement.OnOne(groups.front().front());
  if (on_one.status().code() != absl::StatusCode::kOutOfRange) return on_one;
  for (size_t count = 2; count <= devices_.size(); ++count) {
    for (const std::vector<int>& group : groups) {
      if (group.size() < count) continue;
      std::vector<int> devices(group.begin(), group.begin() + count);
      std::sort(devices.begin(), devices.end());
      if (std::optional<EnginePlan> cut = placement.Cut(devices)) return *std::move(cut);
    }
  }
  return devices_.size() == 1 ? on_one.status() : TooLarge(on_one.status(), devices_, budget);
}

SearchTotals PipelineEngine::Searches() const {
  SearchTotals sum;
  for (const PipelineDevice& device : devices_) {
    const SearchTotals of = device.engine->Searches();
    sum.kept_blocks += of.kept_blocks;
    sum.searched_blocks += of.searched_blocks;
    sum.samples += of.samples;
    sum.seconds += of.seconds;
  }
  return sum;
}

absl::StatusOr<std::unique_ptr<ModuleInstance>> PipelineEngine::Make(
    std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
    const EnginePlan& plan) {
  if (plan.ranges.empty()) {
    return devices_[plan.device].engine->Make(std::move(module), limits, plan);
  }
  std::vector<std::unique_ptr<ModuleInstance>> ranges;
  int64_t first = 0;
  for (const EnginePlan& range : plan.ranges) {
    const int64_t end = first + static_cast<int64_t>(range.plan.recompute.size());
    ASSIGN_OR_RETURN(ranges.emplace_back(), devices_[range.device].engine->Make(
                                                SliceOf(*module, first, end), limits, range));
    first = end;
  }
  ASSIGN_OR_RETURN(LargeBuffer border, LargeBuffer::Make(BorderBytes(module->graph, limits)));
  return std::make_unique<PipelineInstance>(std::move(module), plan, std::move(ranges),
                                            std::move(border));
}

}  // namespace attnd
