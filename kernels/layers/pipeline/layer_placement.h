// LayerPlacement: on which devices a module's layers lie, by what plans of their engines take.
// Pure functions of what it was made with; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "modules/module_engine.h"
#include "kernels/layers/pipeline/pipeline_device.h"

namespace attnd {

// Layers [first, end) as a module of their own, of the same bits.
std::shared_ptr<const ModuleDescription> SliceOf(const ModuleDescription& module, int64_t first,
                                                 int64_t end);

// The first of the table's entries that is of `layer` or a later one.
int64_t FirstEntry(const WeightTable& table, int64_t layer);

// Counts the host memory for what passes from range to range.
int64_t BorderBytes(const ModuleGraph& graph, const ModuleLimits& limits);

class LayerPlacement {
 public:
  // All outlive it.
  LayerPlacement(const std::vector<PipelineDevice>& devices, const ModuleDescription& module,
                 const ModuleLimits& limits, const MemoryBudget& budget);

  // Those that can compute it, of one architecture each, the one with the most room first.
  const std::vector<std::vector<int>>& groups() const { return groups_; }
  absl::StatusOr<EnginePlan> OnOne(int device) const;
  // As layers wish; those without a wish for a device that is there lie where the one before them
  // does, the first ones with the first wish. Nothing: nobody wishes, it does not fit so, or the
  // devices are of several architectures.
  std::optional<EnginePlan> AsWished() const;
  // On these, in this order, in proportion to their room. Nothing: it does not fit.
  std::optional<EnginePlan> Cut(const std::vector<int>& devices) const;

 private:
  struct Range {
    int device = 0;
    int64_t first = 0, end = 0;
    int64_t bytes = 0;  // that it needs
  };
  using Ranges = std::vector<Range>;

  int64_t Layers() const { return static_cast<int64_t>(module_.graph.layout().layers.size()); }
  // The group of `device`; null: it cannot compute the module, or is not there.
  const std::vector<int>* GroupOf(int64_t device) const;
  absl::StatusOr<EnginePlan> PlanOf(const Range& range, const ModuleLimits& limits,
                                    int64_t room) const;
  // Finds, among the ways to recompute, the least for which `choose` finds ranges that fit
  // together.
  std::optional<EnginePlan> Place(
      const std::function<std::optional<Ranges>(const ModuleLimits&)>& choose) const;
  // As many layers on each device as fit into `share` of its room, one device after the other.
  std::optional<Ranges> Fill(const std::vector<int>& devices, const ModuleLimits& limits,
                             double share) const;
  std::optional<EnginePlan> Join(const Ranges& ranges) const;

  const std::vector<PipelineDevice>& devices_;
  const ModuleDescription& module_;
  const ModuleLimits& limits_;
  const MemoryBudget& budget_;
  std::vector<std::vector<int>> groups_;
};

}  // namespace attnd
