// ModuleDevice: what an instance of a module is computed on: memory, and the operations of layers
// on tensors in it. The executor says what to compute and where everything lies; a device knows
// nothing of layers, activations or steps. One device for each instance.
//
// Pointers   of tensors are the device's: the executor offers them and never reads through them.
//            "host" marks what is not.
// Order      operations happen in the order of the calls, some later than the call; Get,
//            SquaredNorms and Finish wait for all before. Until then host memory of Put stays.
// Errors     of an operation that cannot say so: the next of those that return a status. After an
//            error contents are arbitrary.
// Results    rounding and sums as kernels/dense/operands.h and proto/attnd/v1/module.proto say.
// Threads    one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/dense/operands.h"
#include "modules/layout.h"
#include "modules/module_engine.h"
#include "modules/optimizer_step.h"

namespace attnd {

// As the executor aligns tensors.
inline constexpr int64_t kTensorAlignment = 64;

// A matrix among the weights, [rows, columns], and what Pack made of it.
struct WeightMatrix {
  ConstTensor weight;
  int64_t rows = 0, columns = 0;
  ElementType operand = ElementType::kFloat32;  // products round it to this
  std::byte* packed = nullptr;                  // PackedBytes of room
};

// c [rows, weight's other side] ← a·Wᵀ or a·W (a [rows, depth]), operands rounded to W's `operand`.
struct WeightProduct {
  int64_t rows = 0;
  ConstTensor a;
  WeightMatrix weight;
  bool is_transposed = false;  // a·Wᵀ: sums run along W's rows
  ConstTensor bias;            // or null
  Tensor c;
  bool add = false;

  int64_t depth() const { return is_transposed ? weight.columns : weight.rows; }
  int64_t columns() const { return is_transposed ? weight.rows : weight.columns; }
};

// sums [a's columns, b's columns] += aᵀ·b over `rows` rows, in blocks of kGradientBlockRows.
struct GradientProduct {
  int64_t rows = 0;
  ConstTensor a, b;  // [rows, …], rounded to `operand`
  int64_t a_columns = 0, b_columns = 0;
  ElementType operand = ElementType::kFloat32;
  float* sums = nullptr;
  float* column_sums = nullptr;  // += a's columns, as AddColumnSums adds them; or null
};

enum class TurnDirection : uint8_t { kForward, kBackward };

// [rows, head_count, dim], turned in place; row r stands at positions[r] (host).
struct RotaryHeads {
  Tensor heads;
  int64_t rows = 0, head_count = 0, dim = 0;
  const std::vector<uint32_t>* positions = nullptr;
};

// A problem with all rows and keys of this one in one sequence: what AttentionBytes is asked of.
inline Problem OneSequence(const Problem& problem) {
  Problem one = problem;
  const bool is_packed = IsPacked(problem.layout);
  one.q_len = is_packed ? problem.q_len : problem.batch * problem.q_len;
  one.kv_len = is_packed ? problem.kv_len : problem.batch * problem.kv_len;
  one.batch = 1;
  one.layout = Layout::kBlhd;
  one.kv_lengths.clear();
  one.cu_seqlens_q.clear();
  one.cu_seqlens_k.clear();
  return one;
}

// Sums of float32 numbers of the same count on the devices of several processes, beside the
// numbers. Its calls are ModuleInstance's of the same names.
class ReplicaSums {
 public:
  virtual ~ReplicaSums() = default;
  virtual int64_t Bytes(int64_t count, int replicas) const = 0;
  virtual absl::Status Prepare(int64_t count, int replicas) = 0;
  virtual absl::StatusOr<std::string> NewGroup() = 0;
  virtual absl::Status Sum(const ReplicaCall& call, const float* numbers, int64_t count) = 0;
  virtual const float* sums() const = 0;  // of the last Sum; null after End
  virtual void End() = 0;
};

class ModuleDevice {
 public:
  virtual ~ModuleDevice() = default;

  // ---- Sizes, before there is memory.
  // What the device keeps for itself at the end of what Allocate takes.
  virtual int64_t OwnBytes() const = 0;
  virtual int64_t PackedBytes(const WeightMatrix& matrix) const = 0;
  // Memory of this device beside tensors, of problems with at most the rows and keys of this one
  // sequence, however many sequences they cut them into.
  virtual int64_t AttentionBytes(const Problem& one_sequence, Direction direction) const = 0;

  // ---- Memory.
  // Once: zeroed, aligned to kArenaAlignment, until the device goes. RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::byte*> Allocate(int64_t bytes) = 0;
  // `count` numbers from or to host memory, each converted by way of float32. Operations go on
  // meanwhile: until Finish the host's numbers of a Put and the device's of a Get stay as they are,
  // and the host has those of a Get only after it. No operation since the last Finish touches what
  // a Put writes.
  virtual absl::Status Put(ElementType from, const void* host, Tensor to, int64_t count) = 0;
  virtual absl::Status Get(ConstTensor from, ElementType to, void* host, int64_t count) = 0;
  // A call's x comes and its y goes in parts of at least so many bytes, while another part is
  // computed; 0: in one piece.
  virtual int64_t PartBytes() const { return 0; }
  virtual void SetZero(void* to, int64_t bytes) = 0;
  virtual void Copy(const void* from, void* to, int64_t bytes) = 0;
  virtual absl::Status Finish() = 0;
  // Counts all Puts and Gets that have been waited for.
  virtual TransferSeconds transfers() const { return {}; }

  // ---- Products.
  virtual void Pack(const WeightMatrix& matrix) = 0;  // its weight changed
  virtual void Multiply(const WeightProduct& product) = 0;
  virtual void AddGradient(const GradientProduct& product) = 0;
  virtual void AddColumnSums(const ColumnSum& sum) = 0;

  // ---- Vectors.
  virtual void Norm(const NormOperands& norm, Tensor y, int64_t vectors) = 0;
  // dx, and statistics [vectors] for AddNormGradients.
  virtual void NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                            NormStatistics* statistics, int64_t vectors) = 0;
  virtual void AddNormGradients(const NormOperands& norm, const NormGradients& gradients) = 0;
  virtual void Turn(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads) = 0;

  // ---- Numbers.
  virtual void ApplyCurve(Curve curve, ConstTensor x, Tensor y, int64_t count) = 0;
  // dx ← dy · slope(x)
  virtual void ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                               int64_t count) = 0;
  virtual void Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out,
                       bool add, int64_t count) = 0;
  virtual void Drop(const DropoutRule& rule, ConstTensor in, Tensor out, bool add, int64_t rows,
                    int64_t columns) = 0;
  // `count` columns of each row.
  virtual void CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out,
                           const ColumnRange& to, bool add, int64_t rows, int64_t count) = 0;

  // ---- Segments. Vectors' and numbers' operations between the two, and sums of columns, may run
  // as fewer kernels, of the same bits. What they write at `unread` nothing reads afterwards, so
  // that it need not be written.
  virtual void BeginSegment(absl::Span<const void* const> unread) { static_cast<void>(unread); }
  virtual void EndSegment() {}

  // ---- Attention. mask_bits are the host's; the workspace has AttentionBytes of OneSequence.
  virtual absl::Status Supports(const Problem& problem, Direction direction) const = 0;
  // Whether q, k and v may be columns of wider rows (RowStrides), in whole chunks of so many
  // numbers; 0: they lie end to end.
  virtual int64_t AttendedChunk() const { return 0; }
  virtual absl::Status Attend(const ForwardCall& call) = 0;
  virtual absl::Status AttendBackward(const BackwardCall& call) = 0;

  // ---- Steps.
  // Of each range, as modules/optimizer.h's.
  struct Gradients {
    const float* data = nullptr;
    int64_t count = 0;
  };
  virtual absl::Status SquaredNorms(absl::Span<const Gradients> ranges,
                                    absl::Span<double> norms) = 0;
  // One weight's step: beside its numbers, Pack of its matrix, if it is one, and its gradient set
  // to 0.
  struct WeightStep {
    EntryStep step;
    float* gradient = nullptr;
    std::optional<WeightMatrix> matrix;
  };
  virtual void Step(absl::Span<const WeightStep> steps) = 0;

  // ---- Replicas. Null: this device is not connected to others.
  virtual ReplicaSums* replica_sums() { return nullptr; }
};

}  // namespace attnd
