#include "kernels/layers/pipeline/pipeline_instance.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/layers/pipeline/layer_placement.h"
#include "modules/op_uses.h"
#include "modules/tensor_bytes.h"

namespace attnd {
namespace {

bool ReadsMemory(const ModuleGraph& graph) {
  for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
    for (const ModuleOp& op : graph.BlockOf(layer).ops) {
      for (const ValueUse& use : ValuesOf(op)) {
        if (use.value == kMemoryValue) return true;
      }
    }
  }
  return false;
}

}  // namespace

PipelineInstance::PipelineInstance(std::shared_ptr<const ModuleDescription> module,
                                   const EnginePlan& plan,
                                   std::vector<std::unique_ptr<ModuleInstance>> ranges,
                                   LargeBuffer border)
    : module_(std::move(module)), plan_(plan), border_(std::move(border)) {
  for (std::unique_ptr<ModuleInstance>& instance : ranges) {
    const ModuleGraph& graph = instance->description().graph;
    const int64_t first_entry = FirstEntry(module_->table, graph.first_layer());
    const bool reads_memory = ReadsMemory(graph);
    const int64_t first = graph.first_layer();
    ranges_.push_back(
        {std::move(instance), first_entry, {first, first + graph.layers()}, reads_memory});
  }
}

int64_t PipelineInstance::KeptRows() const {
  int64_t most = 0;
  for (const Range& range : ranges_) most = std::max(most, range.instance->KeptRows());
  return most;
}

LayerRange PipelineInstance::Part(const Range& range, LayerRange all) {
  const int64_t first = std::max(all.first, range.layers.first);
  const int64_t end = std::min(all.end, range.layers.end);
  if (first >= end) return {};
  return {first - range.layers.first, end - range.layers.first};
}

// ---- Tensors.

const PipelineInstance::Range& PipelineInstance::RangeOf(int64_t entry) const {
  const auto is_behind = [](int64_t number, const Range& range) {
    return number < range.first_entry;
  };
  return *(std::upper_bound(ranges_.begin(), ranges_.end(), entry, is_behind) - 1);
}

absl::Status PipelineInstance::Put(int64_t entry, TensorRole role, ElementType element,
                                   absl::Span<const std::byte> bytes) {
  const Range& range = RangeOf(entry);
  return range.instance->Put(entry - range.first_entry, role, element, bytes);
}

absl::Status PipelineInstance::Get(int64_t entry, TensorRole role, ElementType element,
                                   absl::Span<std::byte> bytes) const {
  const Range& range = RangeOf(entry);
  return range.instance->Get(entry - range.first_entry, role, element, bytes);
}

// ---- Calls.

absl::Span<std::byte> PipelineInstance::Border(size_t range, int64_t rows) {
  const ModuleGraph& graph = ranges_[range].instance->description().graph;
  const int64_t bytes = rows * graph.layout().width * ElementBytes(graph.x_element());
  return {border_.data(), static_cast<size_t>(bytes)};
}

void PipelineInstance::Drop(const std::vector<ActivationId>& of_ranges) {
  for (size_t n = 0; n < of_ranges.size(); ++n) ranges_[n].instance->DropActivation(of_ranges[n]);
}

absl::StatusOr<ActivationId> PipelineInstance::Forward(const ModuleForwardCall& call) {
  CheckSizes(*module_, call);
  const int64_t rows = call.rows->rows();
  ModuleForwardCall of_range = call;
  std::vector<ActivationId> kept;
  const LayerRange layers = module_->graph.Resolved(call.layers);
  for (size_t n = 0; n < ranges_.size(); ++n) {
    of_range.layers = Part(ranges_[n], layers);
    if (of_range.layers.size() == 0) {
      kept.push_back(0);
      continue;
    }
    of_range.y = ranges_[n].layers.end < layers.end ? Border(n + 1, rows) : call.y;
    const absl::StatusOr<ActivationId> done = ranges_[n].instance->Forward(of_range);
    if (!done.ok()) {
      Drop(kept);
      return done.status();
    }
    kept.push_back(*done);
    of_range.x = of_range.y;
  }
  if (!call.keep) return ActivationId{0};
  kept_.emplace(++last_activation_, Kept{std::move(kept), rows});
  return last_activation_;
}

absl::Status PipelineInstance::Backward(const ModuleBackwardCall& call) {
  const auto found = kept_.find(call.activation);
  if (found == kept_.end()) return absl::NotFoundError("activation: dropped, or never kept");
  if (call.stop.stop_requested()) return absl::CancelledError("stopped");
  ModuleBackwardCall of_range = call;
  // Once the last range has added its gradients the others must.
  if (call.add_gradients) of_range.stop = {};
  bool memory_is_set = call.add_d_memory;
  for (size_t n = ranges_.size(); n-- > 0;) {
    of_range.activation = found->second.of_ranges[n];
    if (of_range.activation == 0) continue;
    const bool is_first = n == 0 || found->second.of_ranges[n - 1] == 0;
    const bool gives_memory = ranges_[n].reads_memory || (is_first && !memory_is_set);
    of_range.dx = !is_first ? Border(n, found->second.rows) : call.dx;
    of_range.d_memory = gives_memory ? call.d_memory : absl::Span<std::byte>();
    of_range.add_d_memory = memory_is_set && !of_range.d_memory.empty();
    RETURN_IF_ERROR(ranges_[n].instance->Backward(of_range));
    memory_is_set |= gives_memory;
    of_range.dy = of_range.dx;
  }
  return absl::OkStatus();
}

void PipelineInstance::DropActivation(ActivationId activation) {
  const auto found = kept_.find(activation);
  if (found == kept_.end()) return;
  Drop(found->second.of_ranges);
  kept_.erase(found);
}

// ---- Steps.

absl::Status PipelineInstance::SquaredNorms(absl::Span<double> norms) {
  for (const Range& range : ranges_) {
    const size_t entries = range.instance->description().table.entries().size();
    RETURN_IF_ERROR(range.instance->SquaredNorms(norms.subspan(range.first_entry, entries)));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> PipelineInstance::Step(const StepCall& call) {
  StepCall of_range = call;
  if (!call.stats.has_value()) {
    ASSIGN_OR_RETURN(of_range.stats, Stats());
  }
  StepResult result;
  for (const Range& range : ranges_) {
    if (!call.parameters.empty()) {
      const size_t entries = range.instance->description().table.entries().size();
      of_range.parameters = call.parameters.subspan(range.first_entry, entries);
    }
    ASSIGN_OR_RETURN(result, range.instance->Step(of_range));
  }
  return result;
}

absl::Status PipelineInstance::ClearGradients() {
  for (const Range& range : ranges_) RETURN_IF_ERROR(range.instance->ClearGradients());
  return absl::OkStatus();
}

void PipelineInstance::SetOptimizerStep(int64_t step) {
  for (const Range& range : ranges_) range.instance->SetOptimizerStep(step);
}

}  // namespace attnd
