// LayerRun: the ops of one layer in one call, segment by segment, forward and backward, on an
// instance's memory. What ExecutorInstance runs. One call at a time.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "kernels/layers/executor/attention_run.h"
#include "kernels/layers/executor/instance_tensors.h"
#include "modules/segments/segment.h"

namespace attnd {

// Gradients of a layer's values: the uses' gradients, last use first.
struct LayerGradients {
  std::vector<Tensor> values;  // [ops + 2]; null data: nobody asks for it
  std::vector<bool> is_set;    // [ops + 2]: some use has given its share
};

class LayerRun {
 public:
  // All outlive the object. `places`: of the buffers of this direction.
  LayerRun(const InstanceTensors& module, const InstanceCall& call, int64_t layer,
           const BufferPlaces& places, const LayerValues& values)
      : module_(module),
        call_(call),
        layer_(layer),
        places_(places),
        values_(values),
        shapes_(module.graph().ShapesOf(layer)) {}

  // Sets the outputs of a segment's ops. `order` is that of the segment's places; `is_kept`: for a
  // backward.
  absl::Status Forward(const OpSegment& segment, const OpOrder& order, bool is_kept) const;
  // Adds the gradients of what a segment's ops read.
  absl::Status Backward(const OpSegment& segment, const OpOrder& order, bool adds,
                        LayerGradients& gradients) const;

  // Sets the output of `op`, and its logsumexp, from the values before it.
  absl::Status Forward(int64_t op) const;

  // Adds the gradients of what `op` read, given its output's; where `adds`, those of its
  // parameters.
  absl::Status Backward(int64_t op, bool adds, LayerGradients& gradients) const;

 private:
  struct ForwardOp;
  struct BackwardOp;

  int64_t Rows(int64_t value) const { return call_.rows.RowsOf(shapes_.values[value].rows); }
  int64_t Columns(int64_t value) const { return shapes_.values[value].columns; }
  int64_t Count(int64_t value) const { return Rows(value) * Columns(value); }
  template <class RunOps>
  absl::Status InSegment(const OpSegment& segment, const std::vector<int64_t>& unread,
                         const std::vector<Tensor>& tensors, const RunOps& run_ops) const;
  std::byte* Buffer(BufferUse use, int64_t number) const;
  WeightProduct ProductOf(const LinearOp& op, bool is_forward) const;
  NormOperands NormOf(const NormOp& op) const;
  DropoutRule RuleOf(const DropoutOp& op, int64_t number) const;

  const InstanceTensors& module_;
  const InstanceCall& call_;
  const int64_t layer_;
  const BufferPlaces& places_;
  const LayerValues& values_;
  const BlockShapes& shapes_;
};

}  // namespace attnd
