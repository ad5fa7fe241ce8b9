// PipelineInstance: one module as instances of its layers' ranges, each on its device.
//
//   Forward    range after range; y of one is x of the next
//   Backward   from the last range on; dx of one is dy of the one before. The memory's gradient
//              goes with it, so that sums are in the order of one device
//   Step       the squared norm goes through the ranges as through the table; then each range's own
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/large_buffer.h"
#include "modules/module_engine.h"

namespace attnd {

class PipelineInstance : public ModuleInstance {
 public:
  // `ranges` in order, of the plan's. `border` of BorderBytes.
  PipelineInstance(std::shared_ptr<const ModuleDescription> module, const EnginePlan& plan,
                   std::vector<std::unique_ptr<ModuleInstance>> ranges, LargeBuffer border);

  const ModuleDescription& description() const override { return *module_; }
  const EnginePlan& plan() const override { return plan_; }
  absl::Status Put(int64_t entry, TensorRole role, ElementType element,
                   absl::Span<const std::byte> bytes) override;
  absl::Status Get(int64_t entry, TensorRole role, ElementType element,
                   absl::Span<std::byte> bytes) const override;
  absl::StatusOr<ActivationId> Forward(const ModuleForwardCall& call) override;
  absl::Status Backward(const ModuleBackwardCall& call) override;
  void DropActivation(ActivationId activation) override;
  int64_t KeptRows() const override;
  absl::Status SquaredNorms(absl::Span<double> norms) override;
  absl::StatusOr<StepResult> Step(const StepCall& call) override;
  absl::Status ClearGradients() override;
  int64_t optimizer_step() const override { return ranges_.front().instance->optimizer_step(); }
  void SetOptimizerStep(int64_t step) override;

 private:
  struct Range {
    std::unique_ptr<ModuleInstance> instance;
    int64_t first_entry = 0;
    LayerRange layers;
    bool reads_memory = false;
  };
  struct Kept {
    std::vector<ActivationId> of_ranges;  // 0: none of its layers was run
    int64_t rows = 0;
  };

  // Layers of `all` that `range` has, counted from its first. Empty: none.
  static LayerRange Part(const Range& range, LayerRange all);
  const Range& RangeOf(int64_t entry) const;
  // The tensor that passes the border before `range`: its x, or dx.
  absl::Span<std::byte> Border(size_t range, int64_t rows);
  void Drop(const std::vector<ActivationId>& of_ranges);

  const std::shared_ptr<const ModuleDescription> module_;  // shared with who registered it
  const EnginePlan plan_;
  std::vector<Range> ranges_;
  LargeBuffer border_;
  std::map<ActivationId, Kept> kept_;
  ActivationId last_activation_ = 0;
};

}  // namespace attnd
