// Functions of single numbers of tensors in any element: activations, sums, products, dropout,
// copies of columns, and sums of columns, as kernels/dense/operands.h says.
// A call does the numbers or rows that it names and touches no others, so a caller may cut a tensor
// among threads as it likes: no bit depends on it. Any thread.
#pragma once

#include <cstdint>

#include "kernels/dense/operands.h"

namespace attnd {

struct IndexRange {
  int64_t first = 0, count = 0;
};

void ApplyCurve(Curve curve, ConstTensor x, Tensor y, IndexRange numbers);
// dx ← dy · slope(x)
void ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                     IndexRange numbers);

void Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out, bool add,
             IndexRange numbers);

void DropRows(const DropoutRule& rule, int64_t columns, ConstTensor in, Tensor out, bool add,
              IndexRange rows);

void CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out, const ColumnRange& to,
                 int64_t count, bool add, IndexRange rows);

void AddColumnSums(const ColumnSum& sum, IndexRange columns);

}  // namespace attnd
