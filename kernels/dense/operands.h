// operands.h: the operations of modules besides attention and products, as data: tensors and the
// rules of single operations, whatever device runs them. Pointers are the device's.
//
// Rounding   arithmetic is float32; each result is rounded once to its element. With `add` the
//            result is rounded, then added to what stands there, then rounded again.
#pragma once

#include <cstdint>
#include <optional>

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

// Gradients of parameters are summed in blocks of this many rows.
inline constexpr int64_t kGradientBlockRows = 1024;

enum class Curve : uint8_t {
  kRelu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kQuickGelu = 5,
  kTanh = 6,
};

enum class Combination : uint8_t {
  kScaled,   // scale · a; b is not looked at
  kSum,      // a + scale · b
  kProduct,  // a · (scale · b)
};

// Dropout multiplies numbers of [rows, columns] by 0 or 256 / (256 − threshold)
// (attention/elementwise_dropout.h).
struct DropoutRule {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold = 0;
  int64_t first_row = 0;  // of the tensor in the caller's whole one
};

// Columns [first, first + count) of rows of `stride` numbers.
struct ColumnRange {
  int64_t stride = 0, first = 0;
};

// sums[n] += Σ over rows of column n of [rows, columns], numbers rounded to `operand` first. Rows
// in blocks of kGradientBlockRows, one addition a block.
struct ColumnSum {
  ConstTensor in;
  ElementType operand = ElementType::kFloat32;
  int64_t rows = 0, columns = 0;
  float* sums = nullptr;
};

// Layer and RMS normalisation of vectors that lie end to end.
struct NormOperands {
  int64_t count = 0;        // numbers of a vector
  bool is_centred = false;  // layer norm; else RMS
  float epsilon = 0;
  float weight_offset = 0;
  std::optional<ElementType> round_before_weight;
  ConstTensor weight, bias;  // [count] or null
  ConstTensor x;             // [vectors, count]
};

struct NormStatistics {
  float mean, rstd;
};

// Σ dy·n into d_weight and Σ dy into d_bias [count], either of which may be null: one addition for
// each kGradientBlockRows rows, `per_row` vectors making a row.
struct NormGradients {
  ConstTensor dy;
  const NormStatistics* statistics = nullptr;
  int64_t vectors = 0, per_row = 1;
  float* d_weight = nullptr;
  float* d_bias = nullptr;
};

}  // namespace attnd
