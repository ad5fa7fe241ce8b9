// Tensors of layers as kernels of kernels/dense are told of them. Pure functions; any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/dense/dense_params.h"
#include "kernels/dense/operands.h"

namespace attnd {

// Describes a tensor that nobody writes through this.
inline DenseTensor TensorOf(const ConstTensor& t) {
  return {const_cast<void*>(t.data), cuda::BiasCode(t.element)};
}
inline DenseTensor TensorOf(const Tensor& t) { return {t.data, cuda::BiasCode(t.element)}; }

inline int64_t CodeBytes(int32_t element) { return element == kBiasFloat32 ? 4 : 2; }
inline DenseTensor Behind(const DenseTensor& t, int64_t numbers) {
  if (t.data == nullptr) return t;
  return {static_cast<std::byte*>(t.data) + numbers * CodeBytes(t.element), t.element};
}

// The element of all tensors where kernels may take it that groups of neighbours are whole and
// aligned (NumbersDesc::whole). `lengths`: of rows, and from row to row.
inline int32_t WholeElement(absl::Span<const DenseTensor> tensors,
                            absl::Span<const int64_t> lengths) {
  int32_t element = kBiasNone;
  for (const DenseTensor& t : tensors) {
    if (t.data == nullptr) continue;
    if (element == kBiasNone) element = t.element;
    if (t.element != element) return kBiasNone;
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return kBiasNone;
  }
  const bool are_whole = std::all_of(lengths.begin(), lengths.end(),
                                     [](int64_t length) { return length % kNumbersOfGroup == 0; });
  return are_whole ? element : static_cast<int32_t>(kBiasNone);
}

// As one row.
inline NumbersDesc NumbersOf(NumbersOp op, const ConstTensor& a, const Tensor& out, int64_t count) {
  return {.a = TensorOf(a), .out = TensorOf(out), .rows = 1, .columns = count, .rule = {.op = op}};
}

}  // namespace attnd
