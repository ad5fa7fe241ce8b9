// Functions of single numbers of tensors in any element: activations, sums, products, dropout,
// copies of columns, and sums of columns. Arithmetic is float32; each result is rounded once to its
// element. With `add` the result is rounded, then added to what stands there, then rounded again.
// A call does the numbers or rows that it names and touches no others, so a caller may cut a tensor
// among threads as it likes: no bit depends on it. Any thread.
#pragma once

#include <cstdint>

#include "attention/element.h"

namespace attnd {

struct ConstTensor {
  const void* data = nullptr;
  ElementType element = ElementType::kFloat32;
};
struct Tensor {
  void* data = nullptr;
  ElementType element = ElementType::kFloat32;
  operator ConstTensor() const { return {data, element}; }
};

struct IndexRange {
  int64_t first = 0, count = 0;
};

enum class Curve : uint8_t {
  kRelu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kQuickGelu = 5,
  kTanh = 6,
};
void ApplyCurve(Curve curve, ConstTensor x, Tensor y, IndexRange numbers);
// dx ← dy · slope(x)
void ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                     IndexRange numbers);

enum class Combination : uint8_t {
  kScaled,   // scale · a; b is not looked at
  kSum,      // a + scale · b
  kProduct,  // a · (scale · b)
};
void Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out, bool add,
             IndexRange numbers);

// Of [rows, columns]: numbers times 0 or 256 / (256 − threshold) (attention/elementwise_dropout.h).
struct DropoutRule {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold = 0;
  int64_t first_row = 0;  // of the tensor in the caller's whole one
};
void DropRows(const DropoutRule& rule, int64_t columns, ConstTensor in, Tensor out, bool add,
              IndexRange rows);

// Columns [first, first + count) of rows of `stride` numbers.
struct ColumnRange {
  int64_t stride = 0, first = 0;
};
void CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out, const ColumnRange& to,
                 int64_t count, bool add, IndexRange rows);

// sums[n] += Σ over rows of column n of [rows, columns], numbers rounded to `operand` first, for
// the columns named. Rows in blocks of kGradientBlockRows, one addition a block.
struct ColumnSum {
  ConstTensor in;
  ElementType operand = ElementType::kFloat32;
  int64_t rows = 0, columns = 0;
  float* sums = nullptr;
};
void AddColumnSums(const ColumnSum& sum, IndexRange columns);

}  // namespace attnd
