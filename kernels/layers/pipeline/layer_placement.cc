#include "kernels/layers/pipeline/layer_placement.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace attnd {
namespace {

// The share of their room that devices give is found to 1/64.
constexpr int kHalvings = 6;

void AddTo(EnginePlan& sum, const EnginePlan& range) {
  ModulePlan& plan = sum.plan;
  plan.weight_bytes += range.plan.weight_bytes;
  plan.optimizer_bytes += range.plan.optimizer_bytes;
  plan.activation_bytes += range.plan.activation_bytes;
  plan.workspace_bytes += range.plan.workspace_bytes;
  plan.recompute.insert(plan.recompute.end(), range.plan.recompute.begin(),
                        range.plan.recompute.end());
  plan.forward_flops += range.plan.forward_flops;
  plan.backward_flops += range.plan.backward_flops;
  sum.engine_bytes += range.engine_bytes;
}

// The layers that are computed again decide how many fit a device.
std::vector<ModuleLimits> WaysToRecompute(const ModuleLimits& limits) {
  if (limits.recompute.has_value() || limits.kept_rows == 0) return {limits};
  std::vector<ModuleLimits> ways;
  for (Recompute recompute : {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers}) {
    ways.push_back(limits);
    ways.back().recompute = recompute;
  }
  return ways;
}

}  // namespace

int64_t FirstEntry(const WeightTable& table, int64_t layer) {
  const std::vector<WeightEntry>& entries = table.entries();
  const auto is_before = [layer](const WeightEntry& entry) { return entry.layer < layer; };
  return std::partition_point(entries.begin(), entries.end(), is_before) - entries.begin();
}

std::shared_ptr<const ModuleDescription> SliceOf(const ModuleDescription& module, int64_t first,
                                                 int64_t end) {
  OptimizerSpec optimizer = module.optimizer;
  const std::vector<uint32_t>& all = module.optimizer.groups;
  const auto at = [&](int64_t layer) {
    return all.begin() + std::min<int64_t>(all.size(), FirstEntry(module.table, layer));
  };
  optimizer.groups.assign(at(first), at(end));
  return std::make_shared<const ModuleDescription>(module.graph.Slice(first, end),
                                                   std::move(optimizer));
}

int64_t BorderBytes(const ModuleGraph& graph, const ModuleLimits& limits) {
  const ModuleLayout& layout = graph.layout();
  return limits.max_rows * layout.width *
         std::max(ElementBytes(layout.element), ElementBytes(layout.wide_element));
}

LayerPlacement::LayerPlacement(const std::vector<PipelineDevice>& devices,
                               const ModuleDescription& module, const ModuleLimits& limits,
                               const MemoryBudget& budget)
    : devices_(devices), module_(module), limits_(limits), budget_(budget) {
  std::vector<int> by_room(devices.size());
  std::iota(by_room.begin(), by_room.end(), 0);
  std::stable_sort(by_room.begin(), by_room.end(),
                   [&](int a, int b) { return budget.OnDevice(a) > budget.OnDevice(b); });
  for (int device : by_room) {
    if (!devices[device].engine->Supports(module.graph).ok()) continue;
    const auto group = std::find_if(groups_.begin(), groups_.end(), [&](const auto& of) {
      return devices[of.front()].architecture == devices[device].architecture;
    });
    (group != groups_.end() ? *group : groups_.emplace_back()).push_back(device);
  }
}

const std::vector<int>* LayerPlacement::GroupOf(int64_t device) const {
  for (const std::vector<int>& group : groups_) {
    if (std::find(group.begin(), group.end(), device) != group.end()) return &group;
  }
  return nullptr;
}

absl::StatusOr<EnginePlan> LayerPlacement::PlanOf(const Range& range, const ModuleLimits& limits,
                                                  int64_t room) const {
  const ModuleEngine& engine = *devices_[range.device].engine;
  const bool is_whole = range.first == 0 && range.end == Layers();
  absl::StatusOr<EnginePlan> plan =
      is_whole ? engine.Plan(module_, limits, room)
               : engine.Plan(*SliceOf(module_, range.first, range.end), limits, room);
  if (plan.ok()) plan->device = range.device;
  return plan;
}

absl::StatusOr<EnginePlan> LayerPlacement::OnOne(int device) const {
  return PlanOf({.device = device, .end = Layers()}, limits_, budget_.OnDevice(device));
}

std::optional<EnginePlan> LayerPlacement::AsWished() const {
  const std::vector<int>* group = nullptr;
  Ranges ranges;
  for (int64_t n = 0; n < Layers(); ++n) {
    const std::optional<int64_t> wish = module_.graph.layout().layers[n].device;
    const std::vector<int>* of = wish.has_value() ? GroupOf(*wish) : nullptr;
    if (of == nullptr) continue;
    if (group != nullptr && of != group) return std::nullopt;
    group = of;
    if (!ranges.empty() && ranges.back().device == *wish) continue;
    if (!ranges.empty()) ranges.back().end = n;
    ranges.push_back({.device = static_cast<int>(*wish), .first = ranges.empty() ? 0 : n});
  }
  if (ranges.empty()) return std::nullopt;
  ranges.back().end = Layers();
  return Place([&](const ModuleLimits& limits) -> std::optional<Ranges> {
    for (Range& range : ranges) {
      const absl::StatusOr<EnginePlan> plan = PlanOf(range, limits, budget_.OnDevice(range.device));
      if (!plan.ok()) return std::nullopt;
      range.bytes = plan->bytes();
    }
    return ranges;
  });
}

std::optional<EnginePlan> LayerPlacement::Cut(const std::vector<int>& devices) const {
  return Place([&](const ModuleLimits& limits) {
    std::optional<Ranges> ranges = Fill(devices, limits, 1);
    double too_little = 0, enough = 1;
    for (int n = 0; n < kHalvings && ranges.has_value(); ++n) {
      const double share = (too_little + enough) / 2;
      std::optional<Ranges> even = Fill(devices, limits, share);
      (even.has_value() ? enough : too_little) = share;
      if (even.has_value()) ranges = std::move(even);
    }
    return ranges;
  });
}

std::optional<EnginePlan> LayerPlacement::Place(
    const std::function<std::optional<Ranges>(const ModuleLimits&)>& choose) const {
  for (const ModuleLimits& limits : WaysToRecompute(limits_)) {
    const std::optional<Ranges> ranges = choose(limits);
    if (!ranges.has_value()) continue;
    if (std::optional<EnginePlan> plan = Join(*ranges)) return plan;
  }
  return std::nullopt;
}

std::optional<LayerPlacement::Ranges> LayerPlacement::Fill(const std::vector<int>& devices,
                                                           const ModuleLimits& limits,
                                                           double share) const {
  Ranges ranges;
  int64_t begin = 0, left = budget_.bytes - BorderBytes(module_.graph, limits);
  for (int device : devices) {
    const double room = share * static_cast<double>(budget_.OnDevice(device));
    const int64_t most = std::min(left, static_cast<int64_t>(room));
    Range range{.device = device, .first = begin, .end = begin};
    int64_t over = Layers() + 1;
    while (range.end + 1 < over) {
      const int64_t middle = range.end + (over - range.end) / 2;
      const absl::StatusOr<EnginePlan> plan =
          PlanOf({.device = device, .first = begin, .end = middle}, limits, most);
      if (plan.ok()) {
        range.end = middle;
        range.bytes = plan->bytes();
      } else {
        over = middle;
      }
    }
    if (range.end == begin) continue;
    ranges.push_back(range);
    begin = range.end;
    left -= range.bytes;
    if (begin == Layers()) return ranges;
  }
  return std::nullopt;
}

// A range may take what is left of its device and of the whole once the others behind it have what
// they need: fewer layers compute again.
std::optional<EnginePlan> LayerPlacement::Join(const Ranges& ranges) const {
  const bool is_cut = ranges.size() > 1;
  EnginePlan joined{.engine_bytes = is_cut ? BorderBytes(module_.graph, limits_) : 0,
                    .device = ranges.front().device};
  MemoryBudget left = budget_;
  if (left.devices.empty()) left.devices.assign(devices_.size(), left.bytes);
  left.bytes -= joined.engine_bytes;
  const auto take = [&left](const Range& range, int64_t bytes) {
    left.bytes -= bytes;
    left.devices[range.device] -= bytes;
  };
  for (const Range& range : ranges) take(range, range.bytes);
  for (const Range& range : ranges) {
    take(range, -range.bytes);
    absl::StatusOr<EnginePlan> plan = PlanOf(range, limits_, left.OnDevice(range.device));
    if (!plan.ok()) return std::nullopt;
    if (!is_cut) return *std::move(plan);
    take(range, plan->bytes());
    AddTo(joined, *plan);
    joined.ranges.push_back(*std::move(plan));
  }
  return joined;
}

}  // namespace attnd
