// Staging: a call's tensors as the kernels want them and back. Kernels read rows of whole 16-byte
// chunks (8 float16, 4 float32); callers have rows of any length in their element type. float16 and
// float32 rows that already fit are not copied at all.
//
// bfloat16 travels as float16 times a power of two, chosen per (batch entry, head group) from the
// largest magnitude: bfloat16's 8 bits fit into float16's 11, so the change is exact for numbers
// down to 2^-16 of the largest; below, the error is at most 2^-25 of the largest. Infinities and
// NaN stay what they are.
//
// float32 travels as halves in the bytes that it has: four numbers of a row are one chunk of four
// high parts, then four low ones, times such a power of two. Of numbers down to 2^-16 of the
// largest 22 bits are left; below, the error is at most 2^-39 of the largest. Pure functions, any
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "attention/element.h"
#include "attention/problem.h"
#include "attention/tensor_view.h"

namespace attnd::cuda {

// Where kernels multiply bfloat16 or float32, it travels as it is.
enum class Travel : uint8_t { kAsHalves, kAsItIs };
constexpr bool IsConverted(ElementType element, Travel travel) {
  return element != ElementType::kFloat16 && travel == Travel::kAsHalves;
}

// Rows are counted in units of 16 bits, of which a float32 has two.
constexpr int64_t UnitsOf(ElementType element) { return ElementBytes(element) / 2; }
inline constexpr int64_t kChunk = 8;  // units in 16 bytes
constexpr int64_t PaddedDim(int64_t dim) { return (dim + kChunk - 1) / kChunk * kChunk; }

// Rows of one tensor: [batch, heads, length] rows of `dim` units in a layout.
struct RowShape {
  Layout layout;
  int64_t batch, heads, length, dim;
  TensorStrides Strides() const { return TensorStrides::Of(layout, heads, length, dim); }
  TensorStrides PaddedStrides() const {
    return TensorStrides::Of(layout, heads, length, PaddedDim(dim));
  }
  int64_t rows() const { return (IsPacked(layout) ? 1 : batch) * heads * length; }
  int64_t padded_bytes() const { return rows() * PaddedDim(dim) * 2; }
};

// A block of rows that share one exponent: rows [begin, begin + count) of batch entry `batch` of
// each head [head_begin, head_begin + heads).
struct RowBlock {
  int64_t batch, head_begin, heads, row_begin, rows;
};

// Largest finite magnitude's exponent e: 2^e ≤ max < 2^(e+1); kNoExponent if all are zero or not
// finite.
inline constexpr int kNoExponent = -1000;
int LargestExponent(const RowShape& shape, const uint16_t* bfloat16, const RowBlock& block);
int LargestExponent(const RowShape& shape, const float* data, const RowBlock& block);

// out = float16 of value·2^−exponent, rows padded with zeros.
void HalvesFromBFloat16(const RowShape& shape, const uint16_t* in, const RowBlock& block,
                        int exponent, uint16_t* out);
// out = bfloat16 of value·2^exponent; padding is left out.
void BFloat16FromHalves(const RowShape& shape, const uint16_t* in, const RowBlock& block,
                        int exponent, uint16_t* out);

// out = both parts of value·2^−exponent, by chunks; rows padded with zeros.
void HalvesFromFloats(const RowShape& shape, const float* in, const RowBlock& block, int exponent,
                      uint16_t* out);

// Rows padded with zeros, and back.
void PadRows(const RowShape& shape, const uint16_t* in, uint16_t* out);
void UnpadRows(const RowShape& shape, const uint16_t* in, uint16_t* out);

}  // namespace attnd::cuda
