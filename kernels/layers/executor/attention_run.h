// AttentionRun: one attention op of a layer in one call: columns → heads → QK-norm → rotary → the
// device's attention, and back. One call at a time.
#pragma once

#include "absl/status/status.h"
#include "kernels/layers/executor/instance_tensors.h"

namespace attnd {

// Buffers of the op in one direction; null where the op has no norm and no rotary.
struct TurnedBuffers {
  std::byte *q = nullptr, *k = nullptr;
};

// Backward leaves these gradients of the heads as they were gathered, [rows, columns] in the
// layout's element, or in columns of wider rows.
struct HeadGradients {
  std::byte *q = nullptr, *k = nullptr, *v = nullptr;
  RowStrides strides;
};

class AttentionRun {
 public:
  // All outlive the object.
  AttentionRun(const InstanceTensors& module, const InstanceCall& call, int64_t layer, int64_t op,
               const LayerValues& values);

  absl::Status Forward(const TurnedBuffers& turned) const;

  // `d_o` is the gradient of the op's output. `gradients` are buffers of all three; where q or k is
  // normalised its gradient ends in `turned`, and the field is changed to that. Adds the norms'
  // weight gradients where `adds`.
  absl::Status Backward(const TurnedBuffers& turned, ConstTensor d_o, bool adds,
                        HeadGradients& gradients) const;

 private:
  struct Scratch {
    std::byte *q, *k, *v, *o, *d_o, *workspace;
    float* lse;
  };
  struct Side;  // q or k

  absl::StatusOr<Problem> MakeProblem() const;
  int64_t RowsOf(const HeadColumns& heads) const;
  // Heads as attention reads them: where they lie, or gathered.
  struct Heads {
    const void* data;
    int64_t stride = 0;  // as RowStrides'
  };
  Heads HeadsOf(const HeadColumns& heads, std::byte* scratch) const;
  const void* Gathered(const HeadColumns& heads, std::byte* scratch) const;
  // The tensor in the layout's element, copied to `scratch` where it is not.
  const void* InElement(ConstTensor tensor, int64_t rows, int64_t columns,
                        std::byte* scratch) const;
  void Copy(const HeadColumns& heads, std::byte* to) const;
  Side QuerySide(std::byte* turned) const;
  Side KeySide(std::byte* turned) const;
  NormOperands NormOf(const Side& side) const;
  Heads TurnForward(const Side& side) const;
  std::byte* TurnBackward(const Side& side, std::byte* d_heads, bool adds) const;
  void Rotate(const Side& side, bool is_forward, std::byte* heads) const;

  const InstanceTensors& module_;
  const InstanceCall& call_;
  const int64_t layer_, number_;
  const LayerValues& values_;
  const AttentionOp& op_;
  const BlockShapes& shapes_;
  Scratch scratch_;
};

}  // namespace attnd
