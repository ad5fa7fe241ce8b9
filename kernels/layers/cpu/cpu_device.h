// CpuDevice: this machine's processors as a ModuleDevice: operations happen at the call, on all
// threads of the engine.
#pragma once

#include "base/large_buffer.h"
#include "kernels/layers/cpu/workers.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

class CpuDevice final : public ModuleDevice {
 public:
  // Both outlive the device.
  CpuDevice(Workers& workers, Backend& attention) : workers_(workers), attention_(attention) {}

  int64_t OwnBytes() const override { return 0; }
  int64_t PackedBytes(const WeightMatrix& matrix) const override;
  int64_t AttentionBytes(const Problem& one_sequence, Direction direction) const override;

  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override;
  absl::Status Put(ElementType from, const void* host, Tensor to, int64_t count) override;
  absl::Status Get(ConstTensor from, ElementType to, void* host, int64_t count) override;
  void SetZero(void* to, int64_t bytes) override;
  void Copy(const void* from, void* to, int64_t bytes) override;
  absl::Status Finish() override { return absl::OkStatus(); }

  void Pack(const WeightMatrix& matrix) override;
  void Multiply(const WeightProduct& product) override;
  void AddGradient(const GradientProduct& product) override;
  void AddColumnSums(const ColumnSum& sum) override;

  void Norm(const NormOperands& norm, Tensor y, int64_t vectors) override;
  void NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                    NormStatistics* statistics, int64_t vectors) override;
  void AddNormGradients(const NormOperands& norm, const NormGradients& gradients) override;
  void Turn(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads) override;

  void ApplyCurve(Curve curve, ConstTensor x, Tensor y, int64_t count) override;
  void ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                       int64_t count) override;
  void Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out, bool add,
               int64_t count) override;
  void Drop(const DropoutRule& rule, ConstTensor in, Tensor out, bool add, int64_t rows,
            int64_t columns) override;
  void CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out, const ColumnRange& to,
                   bool add, int64_t rows, int64_t count) override;

  absl::Status Supports(const Problem& problem, Direction direction) const override {
    return attention_.Supports(problem, direction);
  }
  absl::Status Attend(const ForwardCall& call) override {
    return attention_.Forward({&call, 1}).status();
  }
  absl::Status AttendBackward(const BackwardCall& call) override {
    return attention_.Backward({&call, 1}).status();
  }

  absl::Status SquaredNorms(absl::Span<const Gradients> ranges, absl::Span<double> norms) override;
  void Step(absl::Span<const WeightStep> steps) override;

 private:
  Workers& workers_;
  Backend& attention_;
  LargeBuffer memory_;
};

}  // namespace attnd
