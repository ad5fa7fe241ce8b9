#include "modules/reference/reference_engine.h"

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status_macros.h"
#include "modules/optimizer_step.h"
#include "modules/reference/module_reference.h"
#include "modules/tensor_bytes.h"

namespace attnd {
namespace {

struct KeptCall {
  ModuleInputs inputs;
  KeptActivations kept;
};

Numbers NumbersOf(ElementType element, const std::byte* bytes, int64_t count) {
  Numbers numbers(count);
  for (int64_t n = 0; n < count; ++n) numbers[n] = LoadElement(element, bytes, n);
  return numbers;
}

Numbers NumbersOf(ElementType element, absl::Span<const std::byte> bytes) {
  return NumbersOf(element, bytes.data(),
                   static_cast<int64_t>(bytes.size()) / ElementBytes(element));
}

void Store(const Numbers& numbers, ElementType element, absl::Span<std::byte> out) {
  if (out.empty()) return;
  CHECK(out.size() == numbers.size() * ElementBytes(element));
  for (size_t n = 0; n < numbers.size(); ++n) {
    StoreElement(element, out.data(), n, static_cast<float>(numbers[n]));
  }
}

class ReferenceInstance : public ModuleInstance {
 public:
  ReferenceInstance(std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
                    const EnginePlan& plan)
      : module_(std::move(module)),
        limits_(limits),
        plan_(plan),
        weights_(module_->table.elements() * ElementBytes(parameter_element())),
        gradients_(module_->table.trained_elements()) {
    for (int64_t n = 0; n < module_->optimizer.MomentCount(); ++n) {
      moments_[n].resize(gradients_.size());
    }
  }

  const ModuleDescription& description() const override { return *module_; }
  const EnginePlan& plan() const override { return plan_; }

  absl::Status Put(int64_t entry, TensorRole role, ElementType element,
                   absl::Span<const std::byte> bytes) override {
    ASSIGN_OR_RETURN(const ElementType kept, ElementOfRole(*module_, entry, role));
    const int64_t count = module_->table.entries()[entry].elements;
    CHECK(static_cast<int64_t>(bytes.size()) == count * ElementBytes(element));
    ConvertNumbers(element, bytes.data(), kept, Place(entry, role), count);
    return absl::OkStatus();
  }

  absl::Status Get(int64_t entry, TensorRole role, ElementType element,
                   absl::Span<std::byte> bytes) const override {
    ASSIGN_OR_RETURN(const ElementType kept, ElementOfRole(*module_, entry, role));
    const int64_t count = module_->table.entries()[entry].elements;
    CHECK(static_cast<int64_t>(bytes.size()) == count * ElementBytes(element));
    auto* self = const_cast<ReferenceInstance*>(this);
    ConvertNumbers(kept, self->Place(entry, role), element, bytes.data(), count);
    return absl::OkStatus();
  }

  absl::StatusOr<ActivationId> Forward(const ModuleForwardCall& call) override {
    CheckSizes(*module_, call);
    if (call.stop.stop_requested()) return absl::CancelledError("stopped");
    const ModuleGraph& graph = module_->graph;
    const LayerRange layers = graph.Resolved(call.layers);
    const int64_t rows = call.rows->rows() * layers.size();
    if (call.keep && KeptLayerRows() + rows > limits_.kept_rows * graph.layers()) {
      return absl::UnavailableError("activations: no room");
    }
    ModuleInputs inputs{.rows = *call.rows,
                        .dropout = call.dropout,
                        .layers = layers,
                        .x = NumbersOf(graph.BorderElement(layers.first), call.x),
                        .memory = NumbersOf(element(), call.memory),
                        .mask_bits = {call.mask_bits.begin(), call.mask_bits.end()}};
    ForwardResult result = Engine().Forward(inputs, plan_.plan.recompute);
    Store(result.y, graph.BorderElement(layers.end), call.y);
    if (!call.keep) return ActivationId{0};
    kept_.emplace(++last_activation_, KeptCall{std::move(inputs), std::move(result.kept)});
    return last_activation_;
  }

  absl::Status Backward(const ModuleBackwardCall& call) override {
    const auto found = kept_.find(call.activation);
    if (found == kept_.end()) return absl::NotFoundError("activation");
    const KeptCall& kept = found->second;
    const LayerRange layers = kept.inputs.layers;
    CheckSizes(*module_, kept.inputs.rows, layers, call);
    if (call.stop.stop_requested()) return absl::CancelledError("stopped");
    const ModuleReference engine = Engine();
    std::vector<Numbers> sums = engine.EmptyGradients();
    for (size_t n = 0; n < sums.size(); ++n) {
      const float* from = gradients_.data() + Entry(n).trained_offset.value_or(0);
      sums[n].assign(from, from + sums[n].size());
    }
    OutputGradients of{.dy = NumbersOf(module_->graph.BorderElement(layers.end), call.dy)};
    if (call.add_d_memory) of.d_memory = NumbersOf(element(), call.d_memory);
    const BackwardResult result = engine.Backward(kept.inputs, kept.kept, of, sums);
    Store(result.dx, module_->graph.BorderElement(layers.first), call.dx);
    Store(result.d_memory, element(), call.d_memory);
    if (!call.add_gradients) return absl::OkStatus();
    for (size_t n = 0; n < sums.size(); ++n) {
      float* to = gradients_.data() + Entry(n).trained_offset.value_or(0);
      for (double sum : sums[n]) *to++ = static_cast<float>(sum);
    }
    return absl::OkStatus();
  }

  void DropActivation(ActivationId activation) override { kept_.erase(activation); }
  int64_t KeptRows() const override {
    const int64_t layers = module_->graph.layers();
    return (KeptLayerRows() + layers - 1) / layers;
  }

  absl::Status SquaredNorms(absl::Span<double> norms) override {
    for (size_t n = 0; n < norms.size(); ++n) {
      const WeightEntry& entry = Entry(static_cast<int64_t>(n));
      norms[n] = 0;
      if (!entry.trained_offset.has_value()) continue;
      norms[n] = SquaredNorm(
          {gradients_.data() + *entry.trained_offset, static_cast<size_t>(entry.elements)});
    }
    return absl::OkStatus();
  }
  absl::StatusOr<StepResult> Step(const StepCall& call) override {
    StepResult result;
    if (call.stats.has_value()) {
      result.stats = *call.stats;
    } else {
      ASSIGN_OR_RETURN(result.stats, Stats());
    }
    result.applied = IsApplied(*module_, call, result.stats);
    if (result.applied) {
      ++optimizer_step_;
      const OptimizerStep step(*module_, call, result.stats, optimizer_step_);
      const OptimizerTensors tensors{reinterpret_cast<float*>(weights_.data()),
                                     gradients_.data(),
                                     {moments_[0].data(), moments_[1].data(), moments_[2].data()}};
      const std::vector<WeightEntry>& entries = module_->table.entries();
      for (size_t n = 0; n < entries.size(); ++n) {
        if (!step.Skips(n)) step.Of(n, tensors).Apply();
      }
    }
    result.optimizer_step = optimizer_step_;
    RETURN_IF_ERROR(ClearGradients());
    return result;
  }
  absl::Status ClearGradients() override {
    gradients_.assign(gradients_.size(), 0);
    return absl::OkStatus();
  }

  int64_t optimizer_step() const override { return optimizer_step_; }
  void SetOptimizerStep(int64_t step) override { optimizer_step_ = step; }

 private:
  ElementType element() const { return module_->graph.layout().element; }
  ElementType parameter_element() const { return module_->graph.layout().parameter_element; }
  const WeightEntry& Entry(int64_t n) const { return module_->table.entries()[n]; }

  int64_t KeptLayerRows() const {
    int64_t rows = 0;
    for (const auto& [id, kept] : kept_) {
      rows += kept.inputs.rows.rows() * kept.inputs.layers.size();
    }
    return rows;
  }

  void* Place(int64_t entry, TensorRole role) {
    const WeightEntry& of = Entry(entry);
    if (role == TensorRole::kWeight) {
      return weights_.data() + of.offset * ElementBytes(parameter_element());
    }
    if (role == TensorRole::kGradient) return &gradients_[*of.trained_offset];
    const int moment = static_cast<int>(role) - static_cast<int>(TensorRole::kMoment1);
    return &moments_[moment][*of.trained_offset];
  }

  ModuleReference Engine() const {
    std::vector<Numbers> weights;
    for (const WeightEntry& entry : module_->table.entries()) {
      weights.push_back(NumbersOf(
          parameter_element(), weights_.data() + entry.offset * ElementBytes(parameter_element()),
          entry.elements));
    }
    return {module_->graph, module_->table, std::move(weights), Rounding::kElements};
  }

  const std::shared_ptr<const ModuleDescription> module_;  // shared with who registered it
  const ModuleLimits limits_;
  const EnginePlan plan_;
  std::vector<std::byte> weights_;
  std::vector<float> gradients_;
  std::array<std::vector<float>, 3> moments_;
  std::map<ActivationId, KeptCall> kept_;
  ActivationId last_activation_ = 0;
  int64_t optimizer_step_ = 0;
};

}  // namespace

absl::StatusOr<EnginePlan> ReferenceEngine::Plan(const ModuleDescription& module,
                                                 const ModuleLimits& limits,
                                                 const MemoryBudget& budget) const {
  ASSIGN_OR_RETURN(ModulePlan plan, MakePlan(module.graph, module.table, module.optimizer, limits,
                                             budget.OnDevice(0)));
  return EnginePlan{.plan = std::move(plan)};
}

absl::StatusOr<std::unique_ptr<ModuleInstance>> ReferenceEngine::Make(
    std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
    const EnginePlan& plan) {
  return std::make_unique<ReferenceInstance>(std::move(module), limits, plan);
}

}  // namespace attnd
