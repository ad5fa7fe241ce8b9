// ExecutorInstance: one module on a ModuleDevice: its memory, its kept activations, and calls layer
// by layer. One call at a time.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/free_ranges.h"
#include "kernels/layers/executor/instance_memory.h"
#include "kernels/layers/executor/instance_tensors.h"
#include "kernels/layers/executor/layer_run.h"
#include "kernels/layers/executor/module_device.h"
#include "modules/module_engine.h"
#include "modules/segments/segment.h"

namespace attnd {

class ExecutorInstance : public ModuleInstance {
 public:
  // ModuleEngine's Plan for instances on such a device.
  static absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module,
                                         const ModuleLimits& limits, int64_t budget,
                                         const ModuleDevice& device);
  // ModuleEngine's Make, of that plan. `segments`: how each block is cut; empty: op by op.
  // INVALID_ARGUMENT where a cut is not legal.
  static absl::StatusOr<std::unique_ptr<ExecutorInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan, std::unique_ptr<ModuleDevice> device,
      const std::vector<BlockEnds>& segments = {});
  // Cuts each block so from the next call on. No bit depends on it.
  absl::Status Cut(const std::vector<BlockEnds>& segments);

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
  int64_t ReplicaBytes(int replicas) const override;
  absl::Status PrepareReplicas(int replicas) override;
  absl::StatusOr<std::string> NewGroup() override;
  absl::Status SumReplicas(const ReplicaCall& call) override;
  absl::Status TakeSums() override;
  void EndReplicas() override;
  int64_t optimizer_step() const override { return optimizer_step_; }
  void SetOptimizerStep(int64_t step) override { optimizer_step_ = step; }

 private:
  friend class InstanceProbe;  // runs parts of layers

  // An activation: where its values lie, and what its call read.
  struct Kept {
    Kept(const ModuleGraph& graph, const std::vector<Recompute>& recompute, const CallRows& rows,
         LayerRange of)
        : layers(of), places(graph, recompute, {rows.rows(), rows.memory_rows()}, of) {}
    int64_t rows() const { return call.rows.rows() * layers.size(); }  // one for each layer

    InstanceCall call;
    LayerRange layers;
    KeptPlaces places;
    int64_t at = 0;  // in the activations
  };
  struct BlockPlan {
    OpOrder order;
    BlockScheme scheme;
  };
  static absl::StatusOr<std::vector<BlockPlan>> BlocksOf(const ModuleGraph& graph,
                                                         const std::vector<BlockEnds>& segments);
  // One layer's backward, before its first op.
  struct BackwardTensors {
    std::vector<bool> again;  // [ops + 2]: RecomputedValues
    LayerValues values;
    LayerGradients gradients;
  };
  // Places of buffers, by block.
  struct Schedules {
    std::vector<BufferPlaces> forward;   // [blocks]
    std::vector<BufferPlaces> backward;  // [layers]
  };

  ExecutorInstance(std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
                   const EnginePlan& plan, std::unique_ptr<ModuleDevice> device,
                   std::vector<BlockPlan> blocks, const InstanceLayout& layout, std::byte* memory);

  int64_t Layers() const { return module_->graph.layers(); }
  void* Place(int64_t entry, TensorRole role) const;
  // As which it is kept; NOT_FOUND where there is no such tensor.
  absl::StatusOr<ElementType> ElementOf(int64_t entry, TensorRole role) const;
  void Pack(int64_t entry);
  absl::Status ComputeNorms();
  absl::StatusOr<std::unique_ptr<Kept>> Reserve(const CallRows& rows, LayerRange layers);
  int64_t KeptLayerRows() const;
  std::byte* KeptAt(const Kept& kept, int64_t offset) const;
  // The input of `layer` in a call that keeps (or does not); `y` of the last one has number
  // Layers().
  Tensor InputOf(int64_t layer, const Kept* kept) const;
  // The call's memory input, to where ops read it.
  absl::Status BringMemory(const ModuleForwardCall& call, const Kept* kept, InstanceCall& of);
  absl::Status BeforeOp(const InstanceCall& call);
  // Where the layer's values lie but the last one, which is null unless it is kept; of a part from
  // row `first_row` of the whole call on.
  LayerValues ForwardValues(int64_t layer, const InstanceCall& part, int64_t first_row,
                            const Kept* kept) const;
  // `output`: where the layer's last value goes, of the whole call.
  absl::Status ForwardLayer(int64_t layer, const InstanceCall& part, int64_t first_row,
                            const Kept* kept, Tensor output);
  LayerValues KeptValuesOf(int64_t layer, const Kept& kept) const;
  absl::StatusOr<ActivationId> ForwardLayers(const ModuleForwardCall& call);
  // From x to y, on layers of the call.
  absl::Status RunForward(const ModuleForwardCall& call, const InstanceCall& of, LayerRange layers,
                          const Kept* kept);
  absl::Status BackwardLayers(const ModuleBackwardCall& call);
  static absl::Status ForwardAgain(const OpSegment& segment, const OpOrder& order,
                                   const std::vector<bool>& again, const LayerRun& run);
  BackwardTensors BackwardTensorsOf(int64_t layer, const Kept& kept) const;
  absl::Status BackwardLayer(int64_t layer, const Kept& kept, bool adds, bool& memory_is_set);
  Tensor GradientBoundary(int64_t layer) const;

  const std::shared_ptr<const ModuleDescription> module_;  // shared with who registered it
  const ModuleLimits limits_;
  const EnginePlan plan_;
  std::vector<BlockPlan> blocks_;
  const InstanceLayout layout_;
  const std::unique_ptr<ModuleDevice> device_;
  const InstanceTensors tensors_;
  Schedules schedules_;
  std::optional<FreeRanges> free_;  // of the activations
  std::map<ActivationId, std::unique_ptr<Kept>> kept_;
  ActivationId last_activation_ = 0;
  int64_t optimizer_step_ = 0;
  // SquaredNorms of the gradients as they are; empty: not known. Clipping asks before Step does.
  std::vector<double> norms_;
};

}  // namespace attnd
