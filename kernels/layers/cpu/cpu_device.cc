#include "kernels/layers/cpu/cpu_device.h"

#include <cstring>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/cpu/dense/dense_product.h"
#include "kernels/cpu/dense/norm.h"
#include "kernels/cpu/dense/pointwise.h"
#include "kernels/layers/cpu/rotary_rows.h"
#include "modules/arena.h"
#include "modules/tensor_bytes.h"

namespace attnd {
namespace {

// One thread takes so many at a time.
constexpr int64_t kSumColumns = 64;
constexpr int64_t kStepNumbers = int64_t{1} << 16;

}  // namespace

// ---- Memory.

int64_t CpuDevice::PackedBytes(const WeightMatrix& matrix) const {
  return PackedElements(matrix.rows, matrix.columns) * ElementBytes(matrix.operand);
}

// Linear in rows and sequences: the one sequence, and as many as there may be.
int64_t CpuDevice::AttentionBytes(const Problem& one_sequence, Direction direction) const {
  Problem many = one_sequence;
  many.batch = one_sequence.q_len;
  many.q_len = many.kv_len = 1;
  return attention_.WorkspaceBytes(one_sequence, direction) +
         attention_.WorkspaceBytes(many, direction);
}

absl::StatusOr<std::byte*> CpuDevice::Allocate(int64_t bytes) {
  static_assert(LargeBuffer::kAlignment % kArenaAlignment == 0);
  CHECK(memory_.data() == nullptr);
  ASSIGN_OR_RETURN(memory_, LargeBuffer::Make(bytes));
  return memory_.data();
}

absl::Status CpuDevice::Put(ElementType from, const void* host, Tensor to, int64_t count) {
  ConvertNumbers(from, host, to.element, to.data, count);
  return absl::OkStatus();
}

absl::Status CpuDevice::Get(ConstTensor from, ElementType to, void* host, int64_t count) {
  ConvertNumbers(from.element, from.data, to, host, count);
  return absl::OkStatus();
}

void CpuDevice::SetZero(void* to, int64_t bytes) { std::memset(to, 0, bytes); }

void CpuDevice::Copy(const void* from, void* to, int64_t bytes) { std::memcpy(to, from, bytes); }

// ---- Products.

void CpuDevice::Pack(const WeightMatrix& matrix) {
  const PanelSource source{
      {matrix.weight.data, matrix.weight.element, matrix.columns}, matrix.rows, matrix.columns};
  workers_.ForRanges(DensePanels(matrix.rows), 1, [&](IndexRange range) {
    PackPanel(source, range.first, matrix.operand, matrix.packed);
  });
}

void CpuDevice::Multiply(const WeightProduct& product) {
  const WeightMatrix& weight = product.weight;
  DenseProduct dense{.rows = product.rows,
                     .columns = product.columns(),
                     .depth = product.depth(),
                     .operand = weight.operand,
                     .a = {product.a.data, product.a.element, product.depth()},
                     .result = product.add ? DenseResult::kAdd : DenseResult::kStore,
                     .bias = product.bias.data,
                     .bias_element = product.bias.element,
                     .c = product.c.data,
                     .c_element = product.c.element};
  if (product.is_transposed) {
    dense.b = {weight.packed, weight.operand, 0};
    dense.b_order = DenseOrder::kPanels;
  } else {
    dense.b = {weight.weight.data, weight.weight.element, weight.columns};
    dense.b_order = DenseOrder::kDepth;
  }
  workers_.Run(dense);
}

void CpuDevice::AddGradient(const GradientProduct& product) {
  workers_.Run({.rows = product.a_columns,
                .columns = product.b_columns,
                .depth = product.rows,
                .operand = product.operand,
                .a = {product.a.data, product.a.element, product.a_columns},
                .a_order = DenseOrder::kDepth,
                .b = {product.b.data, product.b.element, product.b_columns},
                .b_order = DenseOrder::kDepth,
                .result = DenseResult::kAddBlocks,
                .c = product.sums});
  if (product.column_sums == nullptr) return;
  AddColumnSums({product.a, product.operand, product.rows, product.a_columns, product.column_sums});
}

void CpuDevice::AddColumnSums(const ColumnSum& sum) {
  workers_.ForRanges(sum.columns, kSumColumns,
                     [&](IndexRange columns) { attnd::AddColumnSums(sum, columns); });
}

// ---- Vectors.

void CpuDevice::Norm(const NormOperands& norm, Tensor y, int64_t vectors) {
  workers_.ForRows(vectors, norm.count, [&](IndexRange range) { NormForward(norm, y, range); });
}

void CpuDevice::NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                             NormStatistics* statistics, int64_t vectors) {
  workers_.ForRows(vectors, norm.count, [&](IndexRange range) {
    attnd::NormBackward(norm, dy, dx, add, statistics, range);
  });
}

void CpuDevice::AddNormGradients(const NormOperands& norm, const NormGradients& gradients) {
  workers_.ForRanges(norm.count, kSumColumns, [&](IndexRange columns) {
    attnd::AddNormGradients(norm, gradients, columns);
  });
}

void CpuDevice::Turn(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads) {
  workers_.ForRows(heads.rows, heads.head_count * heads.dim,
                   [&](IndexRange rows) { TurnRows(rotary, direction, heads, rows); });
}

// ---- Numbers.

void CpuDevice::ApplyCurve(Curve curve, ConstTensor x, Tensor y, int64_t count) {
  workers_.ForNumbers(count, [&](IndexRange numbers) { attnd::ApplyCurve(curve, x, y, numbers); });
}

void CpuDevice::ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                                int64_t count) {
  workers_.ForNumbers(
      count, [&](IndexRange numbers) { attnd::ApplyCurveSlope(curve, x, dy, dx, add, numbers); });
}

void CpuDevice::Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out,
                        bool add, int64_t count) {
  workers_.ForNumbers(
      count, [&](IndexRange numbers) { attnd::Combine(kind, a, scale, b, out, add, numbers); });
}

void CpuDevice::Drop(const DropoutRule& rule, ConstTensor in, Tensor out, bool add, int64_t rows,
                     int64_t columns) {
  workers_.ForRows(rows, columns,
                   [&](IndexRange range) { DropRows(rule, columns, in, out, add, range); });
}

void CpuDevice::CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out,
                            const ColumnRange& to, bool add, int64_t rows, int64_t count) {
  workers_.ForRows(rows, count, [&](IndexRange range) {
    attnd::CopyColumns(in, from, out, to, count, add, range);
  });
}

// ---- Steps.

absl::Status CpuDevice::SquaredNorms(absl::Span<const Gradients> ranges, absl::Span<double> norms) {
  workers_.ForRanges(static_cast<int64_t>(ranges.size()), 1, [&](IndexRange range) {
    const Gradients& of = ranges[range.first];
    norms[range.first] = SquaredNorm({of.data, static_cast<size_t>(of.count)});
  });
  return absl::OkStatus();
}

void CpuDevice::Step(absl::Span<const WeightStep> steps) {
  for (const WeightStep& of : steps) {
    workers_.ForRanges(of.step.count, kStepNumbers,
                       [&](IndexRange range) { of.step.Apply(range.first, range.count); });
    if (of.matrix.has_value()) Pack(*of.matrix);
    SetZero(of.gradient, of.step.count * static_cast<int64_t>(sizeof(float)));
  }
}

}  // namespace attnd
