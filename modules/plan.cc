#include "modules/plan.h"

#include <algorithm>
#include <array>
#include <variant>

#include "base/round_up.h"
#include "base/status_macros.h"
#include "modules/call_rows.h"
#include "modules/field_error.h"
#include "modules/layer_schedule.h"

namespace attnd {
namespace {

constexpr int64_t kNumberBytes = 4;
constexpr Recompute kModes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};
// Sums stop here: more than any device has, and a few of them still fit 64 bits.
constexpr int64_t kMostBytes = int64_t{1} << 60;

int64_t SumUpTo(int64_t sum, int64_t count, int64_t each) {
  int64_t product;
  if (__builtin_mul_overflow(count, each, &product)) return kMostBytes;
  return std::min(kMostBytes, sum + std::min(product, kMostBytes));
}

absl::Status CheckRowLimits(const ModuleGraph& graph, const ModuleLimits& limits) {
  RETURN_IF_ERROR(FieldInRange("limits.max_rows", limits.max_rows, 1, kMaxCallRows));
  RETURN_IF_ERROR(FieldInRange("limits.kept_rows", limits.kept_rows, 0, kMaxCallRows));
  const int64_t most = graph.layout().memory_width > 0 ? kMaxCallRows : 0;
  RETURN_IF_ERROR(
      FieldInRange("limits.max_memory_rows", limits.max_memory_rows, most > 0 ? 1 : 0, most));
  RETURN_IF_ERROR(FieldInRange("limits.kept_memory_rows", limits.kept_memory_rows, 0, most));
  if (limits.kept_rows != 0 && limits.kept_rows < limits.max_rows) {
    return WrongField("limits.kept_rows",
                      absl::StrCat("0, or max_rows = ", limits.max_rows, " and more"),
                      limits.kept_rows);
  }
  const int64_t least = limits.kept_rows == 0 ? 0 : limits.max_memory_rows;
  if (limits.kept_memory_rows >= least) return absl::OkStatus();
  return WrongField("limits.kept_memory_rows",
                    absl::StrCat("max_memory_rows = ", least, " or more"), limits.kept_memory_rows);
}

class Planner {
 public:
  Planner(const ModuleGraph& graph, const WeightTable& weights, const ModuleLimits& limits)
      : graph_(graph), weights_(weights), limits_(limits) {
    const RowCounts rows = {limits.max_rows, limits.max_memory_rows};
    for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
      std::vector<ArenaBuffer> forward = ForwardBuffers(graph, block, rows);
      forward_.push_back(PlaceBuffers(forward));
      std::array<int64_t, 4> of_modes = {};
      for (Recompute mode : kModes) {
        std::vector<ArenaBuffer> backward = BackwardBuffers(graph, block, mode, rows);
        of_modes[static_cast<int>(mode)] = PlaceBuffers(backward);
      }
      backward_.push_back(of_modes);
    }
    for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
      std::array<RowCounts, 4> of_modes;
      for (Recompute mode : kModes) {
        of_modes[static_cast<int>(mode)] = KeptBytesPerRow(graph, layer, mode);
      }
      kept_.push_back(of_modes);
    }
  }

  // The first `pointwise` layers compute pointwise ops again, the first `whole` all of them.
  ModulePlan Plan(int64_t pointwise, int64_t whole) const {
    ModulePlan plan;
    const int64_t layers = static_cast<int64_t>(graph_.layout().layers.size());
    for (int64_t n = 0; n < layers; ++n) {
      plan.recompute.push_back(n < whole       ? Recompute::kLayers
                               : n < pointwise ? Recompute::kPointwise
                                               : Recompute::kNone);
    }
    plan.weight_bytes = WeightBytes();
    plan.activation_bytes = ActivationBytes(plan.recompute, limits_.kept_rows);
    plan.workspace_bytes = WorkspaceBytes(plan.recompute);
    return plan;
  }

  int64_t ActivationBytes(const std::vector<Recompute>& recompute, int64_t kept_rows) const {
    if (kept_rows == 0) return 0;
    const ModuleLayout& layout = graph_.layout();
    int64_t bytes =
        SumUpTo(0, limits_.kept_memory_rows, layout.memory_width * ElementBytes(layout.element));
    for (size_t n = 0; n < recompute.size(); ++n) {
      const RowCounts& of_row = kept_[n][static_cast<int>(recompute[n])];
      bytes = SumUpTo(bytes, kept_rows, of_row.input);
      bytes = SumUpTo(bytes, limits_.kept_memory_rows, of_row.memory);
    }
    return bytes;
  }

  // Products of max_rows (and memory rows): forward, and backward with what is computed again.
  void CountFlops(ModulePlan& plan) const {
    for (size_t layer = 0; layer < plan.recompute.size(); ++layer) {
      const int64_t block = graph_.layout().layers[layer].block;
      const std::vector<ModuleOp>& ops = graph_.BlockOf(layer).ops;
      const std::vector<bool> again = RecomputedValues(graph_, block, plan.recompute[layer]);
      for (size_t n = 0; n < ops.size(); ++n) {
        const auto* linear = std::get_if<LinearOp>(&ops[n].kind);
        if (linear == nullptr) continue;
        const WeightEntry& weight = weights_.Of(layer, linear->weight);
        const bool of_memory = graph_.shapes(block).values[linear->input].rows == RowKind::kMemory;
        const double rows =
            static_cast<double>(of_memory ? limits_.max_memory_rows : limits_.max_rows);
        const double product = 2.0 * rows * static_cast<double>(weight.elements);
        plan.forward_flops += product;
        const int products = 1 + weight.trained_offset.has_value() + again[n + kFirstOpValue];
        plan.backward_flops += products * product;
      }
    }
  }

 private:
  int64_t WeightBytes() const {
    const ModuleLayout& layout = graph_.layout();
    int64_t bytes = weights_.elements() * ElementBytes(layout.parameter_element);
    if (layout.parameter_element != layout.element) {
      bytes += weights_.matrix_elements() * ElementBytes(layout.element);
    }
    return bytes;
  }

  int64_t WorkspaceBytes(const std::vector<Recompute>& recompute) const {
    const ModuleLayout& layout = graph_.layout();
    const int64_t widest =
        std::max(ElementBytes(layout.element), ElementBytes(layout.wide_element));
    int64_t most = 0;
    for (size_t n = 0; n < recompute.size(); ++n) {
      const int64_t block = layout.layers[n].block;
      most = std::max(most, forward_[block]);
      if (limits_.kept_rows == 0) continue;
      most = std::max(most, backward_[block][static_cast<int>(recompute[n])]);
    }
    const int64_t boundary = RoundUp(limits_.max_rows * layout.width * widest, kArenaAlignment);
    const int64_t d_memory =
        RoundUp(limits_.max_memory_rows * layout.memory_width * ElementBytes(layout.element),
                kArenaAlignment);
    return most + 2 * boundary + (limits_.kept_rows > 0 ? d_memory : 0);
  }

  const ModuleGraph& graph_;
  const WeightTable& weights_;
  const ModuleLimits& limits_;
  std::vector<int64_t> forward_;                  // [blocks]
  std::vector<std::array<int64_t, 4>> backward_;  // [blocks], by Recompute
  std::vector<std::array<RowCounts, 4>> kept_;    // [layers], by Recompute: bytes a row
};

// Gradients are there for fetching even where no optimizer runs.
int64_t OptimizerBytes(const WeightTable& weights, const OptimizerSpec& optimizer,
                       const ModuleLimits& limits) {
  if (limits.kept_rows == 0) return 0;
  return weights.trained_elements() * kNumberBytes * (1 + optimizer.MomentCount());
}

absl::Status TooLarge(const Planner& planner, const ModulePlan& plan, const ModuleLimits& limits,
                      int64_t budget) {
  const int64_t without = plan.bytes() - plan.activation_bytes;
  const auto fits = [&](int64_t rows) {
    return without + planner.ActivationBytes(plan.recompute, rows) <= budget;
  };
  if (limits.kept_rows == 0 || !fits(limits.max_rows)) {
    return absl::OutOfRangeError(
        absl::StrCat("limits.max_rows: expected a module of at most ", budget,
                     " bytes (by fewer rows or layers, or a larger --module_memory_mib), got ",
                     plan.bytes(), " with ", limits.max_rows, " rows a call"));
  }
  int64_t low = limits.max_rows, high = limits.kept_rows;  // low fits, high does not
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return absl::OutOfRangeError(absl::StrCat("limits.kept_rows: expected at most ", low,
                                            ", which fit ", budget, " bytes, got ",
                                            limits.kept_rows, " of ", plan.bytes(), " bytes"));
}

}  // namespace

absl::StatusOr<ModulePlan> MakePlan(const ModuleGraph& graph, const WeightTable& weights,
                                    const OptimizerSpec& optimizer, const ModuleLimits& limits,
                                    int64_t budget) {
  RETURN_IF_ERROR(CheckRowLimits(graph, limits));
  const Planner planner(graph, weights, limits);
  const int64_t layers = static_cast<int64_t>(graph.layout().layers.size());
  int64_t first = 0, last = 2 * layers;  // how many of the choices below are made
  if (limits.kept_rows == 0) last = 0;
  if (limits.recompute.has_value()) {
    first = last = (static_cast<int64_t>(*limits.recompute) - 1) * layers;
  }
  for (int64_t n = first;; ++n) {
    ModulePlan plan = planner.Plan(std::min(n, layers), std::max<int64_t>(n - layers, 0));
    plan.optimizer_bytes = OptimizerBytes(weights, optimizer, limits);
    if (plan.bytes() <= budget) {
      planner.CountFlops(plan);
      return plan;
    }
    if (n == last) return TooLarge(planner, plan, limits, budget);
  }
}

}  // namespace attnd
