// CudaDevice: one GPU as a ModuleDevice, beside the engine that computes attention on it.
//
//   operations, attention's too → KernelSteps with their descriptors (LaunchQueue) → enqueued while
//   more are added; SquaredNorms and Finish wait for them
//
// Products in wide tiles that follow each other and do not depend on each other are one launch. A
// segment's product on tensor cores takes the curve behind it along.
// Gradients of weights and sums of columns wait for more of them until something would write what
// they read, or read what they write. No bit depends on it.
//
// Attention runs on the tensors where they lie; rows of no whole 16 bytes are copied first, padded
// with zeros. Attention under a mask is a launch of the engine's own, which waits for what is
// queued and is waited for. Sequences that would need much more memory together than the longest
// one alone run one group after the other.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/dense/dense_params.h"
#include "kernels/device.h"
#include "kernels/layers/cuda/dense_tensors.h"
#include "kernels/layers/cuda/joined_chain.h"
#include "kernels/layers/cuda/launch_queue.h"
#include "kernels/layers/cuda/nccl_sums.h"
#include "kernels/layers/cuda/product_group.h"
#include "kernels/layers/cuda/product_tuning.h"
#include "kernels/layers/cuda/sum_group.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

class CudaDevice final : public ModuleDevice {
 public:
  // The engine and `nccl` outlive the device. `hold` and `nccl` may be null.
  explicit CudaDevice(cuda::CudaBackend& engine, HoldDeviceMemory hold = nullptr,
                      const Nccl* nccl = nullptr);

  int64_t OwnBytes() const override { return LaunchQueue::kBytes; }
  int64_t PackedBytes(const WeightMatrix& matrix) const override;
  int64_t AttentionBytes(const Problem& one_sequence, Direction direction) const override;

  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override;
  absl::Status Put(ElementType from, const void* host, Tensor to, int64_t count) override;
  absl::Status Get(ConstTensor from, ElementType to, void* host, int64_t count) override;
  int64_t PartBytes() const override { return part_bytes_; }
  void SetPartBytes(int64_t bytes) { part_bytes_ = bytes; }
  void SetZero(void* to, int64_t bytes) override;
  void Copy(const void* from, void* to, int64_t bytes) override;
  absl::Status Finish() override {
    LaunchAll();
    return queue_.Flush();
  }
  TransferSeconds transfers() const override {
    return {queue_.times().upload, queue_.times().download};
  }

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

  void BeginSegment(absl::Span<const void* const> unread) override;
  void EndSegment() override;

  absl::Status Supports(const Problem& problem, Direction direction) const override {
    return engine_.SupportsInPlace(problem, direction);
  }
  int64_t AttendedChunk() const override { return 8; }
  absl::Status Attend(const ForwardCall& call) override;
  absl::Status AttendBackward(const BackwardCall& call) override;

  absl::Status SquaredNorms(absl::Span<const Gradients> ranges, absl::Span<double> norms) override;
  void Step(absl::Span<const WeightStep> steps) override;
  ReplicaSums* replica_sums() override { return replica_sums_.get(); }

  // ---- For searches. What products that are added from now on take.
  void Tune(ProductTuning tuning) { tuning_ = std::move(tuning); }
  // Tells the log what products could take; null: nobody asks.
  void LogProducts(ProductLog* log) { product_log_ = log; }
  // Counts all kernels that have been waited for, as the GPU's own events measure them.
  double kernel_seconds() const { return queue_.times().kernel; }

 private:
  template <class Call>
  absl::Status RunAttention(const Call& call, const cuda::DevicePart& arena);
  absl::Status QueueAttention(cuda::InPlaceCall& call, const std::stop_token& stop);
  void AddNumbers(NumbersDesc desc);
  // `steps`: of the chains that it has.
  void AddNorm(NormDesc desc, absl::Span<const NumbersStep> steps = {});
  void BeforeNorm(const NormDesc& desc);
  // `sums`: of the segment; those that are left are the caller's to add.
  using Sums = std::vector<std::pair<ColumnSumsDesc, double>>;
  void AddJoined(const JoinedChain& joined, Sums& sums);
  // Whether one launch makes this gradient of a norm and what those of its parameters are sums of.
  bool BringsSums(const NormDesc& norm, absl::Span<const NumbersStep> steps,
                  const ColumnSumsDesc& sums) const;
  void AddNormSums(const NormDesc& norm, const ColumnSumsDesc& sums);
  void AddProduct(PlainProductDesc desc, ElementType operand);
  void AddWaiting(const LayerKernel& kernel, const ProductGroup::Waiting& product);
  void LaunchGroup(ProductGroup& group);
  void LaunchListed(const LayerKernel& kernel, absl::Span<const ProductGroup::Waiting> products);
  void LaunchGradients(const LayerKernel& kernel, absl::Span<const ProductGroup::Waiting> waiting);
  void LaunchWide(const LayerKernel& kernel, absl::Span<const ProductGroup::Waiting> waiting);
  void LaunchSums();
  void LaunchAll();  // that waits
  // Launches those gradients and sums that a launch which writes these bytes has to come after.
  void LaunchTouching(const ByteRange& written);
  // Launches what a launch that writes these bytes, and is no product in wide tiles, has to come
  // after.
  void BeforeWriting(const ByteRange& written);
  void BeforeWriting(const DenseTensor& t, int64_t numbers) {
    BeforeWriting(ByteRange::At(t.data, numbers * CodeBytes(t.element)));
  }
  // The same for a launch that reads them.
  void BeforeReading(const DenseTensor& t, int64_t numbers);
  LayerKernel KernelOf(const PlainProductDesc& desc, ElementType operand);
  TensorMap MapOfOperand(const void* data, int64_t stride, bool by_depth, int32_t size,
                         int32_t depth, int32_t tile);
  WideProductDesc WideDescOf(const PlainProductDesc& desc, int32_t tile_rows);
  void AddSums(ColumnSumsDesc desc, double flops);
  cuda::DevicePart PartAt(const std::byte* begin, int64_t bytes) const;

  cuda::CudaBackend& engine_;
  const HoldDeviceMemory hold_;
  std::shared_ptr<void> held_;  // what hold_ gave, for as long as the memory is there
  std::unique_ptr<cuda::DeviceMemory> memory_;
  int64_t part_bytes_ = 0;
  LaunchQueue queue_;
  // Launches that wait before they are queued.
  ProductGroup siblings_, gradients_;
  SumGroup sums_;
  ProductTuning tuning_;
  ProductLog* product_log_ = nullptr;
  // Launches between BeginSegment and EndSegment.
  struct OpenSegment {
    std::vector<const void*> unread;
    std::optional<std::pair<PlainProductDesc, ElementType>> product;  // and its operands
    std::vector<ChainLink> links;
    Sums sums;
  };
  std::optional<OpenSegment> segment_;
  std::unique_ptr<NcclSums> replica_sums_;  // null without NCCL
};

}  // namespace attnd
