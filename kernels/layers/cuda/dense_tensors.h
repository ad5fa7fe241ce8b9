// Tensors of layers as kernels of kernels/dense are told of them. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

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

// As one row.
inline NumbersDesc NumbersOf(NumbersOp op, const ConstTensor& a, const Tensor& out, int64_t count) {
  return {.a = TensorOf(a), .out = TensorOf(out), .rows = 1, .columns = count, .rule = {.op = op}};
}

}  // namespace attnd
