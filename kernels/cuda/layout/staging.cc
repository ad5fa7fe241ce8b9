#include "kernels/cuda/layout/staging.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace attnd::cuda {
namespace {

// body(row index in the shape's strides) for each row of the block.
template <class Body>
void ForEachRow(const RowShape& shape, const RowBlock& block, const Body& body) {
  TensorStrides from = shape.Strides(), to = shape.PaddedStrides();
  for (int64_t h = block.head_begin; h < block.head_begin + block.heads; ++h) {
    for (int64_t i = block.row_begin; i < block.row_begin + block.rows; ++i) {
      body(from.Row(block.batch, h, i), to.Row(block.batch, h, i));
    }
  }
}

RowBlock WholeEntry(const RowShape& shape, int64_t batch) {
  return {batch, 0, shape.heads, 0, shape.length};
}

int64_t Entries(const RowShape& shape) { return IsPacked(shape.layout) ? 1 : shape.batch; }

}  // namespace

int LargestExponent(const RowShape& shape, const uint16_t* bfloat16, const RowBlock& block) {
  uint16_t largest = 0;
  ForEachRow(shape, block, [&](int64_t from, int64_t) {
    for (int64_t d = 0; d < shape.dim; ++d) {
      uint16_t magnitude = bfloat16[from + d] & 0x7fff;
      if (magnitude < 0x7f80) largest = std::max(largest, magnitude);
    }
  });
  return largest == 0 ? kNoExponent : std::ilogb(FloatFromBFloat16(largest));
}

int LargestExponent(const RowShape& shape, const float* data, const RowBlock& block) {
  float largest = 0;
  ForEachRow(shape, block, [&](int64_t from, int64_t) {
    const float* row = data + from / 2;
    for (int64_t d = 0; d < shape.dim / 2; ++d) {
      const float magnitude = std::fabs(row[d]);
      largest = magnitude > largest && magnitude <= FLT_MAX ? magnitude : largest;
    }
  });
  return largest == 0 ? kNoExponent : std::ilogb(largest);
}

void HalvesFromFloats(const RowShape& shape, const float* in, const RowBlock& block, int exponent,
                      uint16_t* out) {
  const float first = std::ldexp(1.0f, -exponent / 2);
  const float second = std::ldexp(1.0f, -exponent - -exponent / 2);
  const int64_t numbers = shape.dim / 2, padded = PaddedDim(shape.dim) / 2;
  ForEachRow(shape, block, [&](int64_t from, int64_t to) {
    const float* row = in + from / 2;
    uint16_t* chunks = out + to;
    for (int64_t d = 0; d < padded; ++d) {
      const float value = d < numbers ? row[d] * first * second : 0.0f;
      const uint16_t high = Float16FromFloat(value);
      const float rest = value - FloatFromFloat16(high);
      uint16_t* chunk = chunks + d / 4 * kChunk;
      chunk[d % 4] = high;
      chunk[4 + d % 4] = std::isfinite(rest) ? Float16FromFloat(rest) : uint16_t{0};
    }
  });
}

void HalvesFromBFloat16(const RowShape& shape, const uint16_t* in, const RowBlock& block,
                        int exponent, uint16_t* out) {
  // Two steps, because 2^−exponent alone may not be a float.
  const float first = std::ldexp(1.0f, -exponent / 2);
  const float second = std::ldexp(1.0f, -exponent - -exponent / 2);
  ForEachRow(shape, block, [&](int64_t from, int64_t to) {
    for (int64_t d = 0; d < shape.dim; ++d) {
      out[to + d] = Float16FromFloat(FloatFromBFloat16(in[from + d]) * first * second);
    }
    std::memset(out + to + shape.dim, 0, (PaddedDim(shape.dim) - shape.dim) * 2);
  });
}

void BFloat16FromHalves(const RowShape& shape, const uint16_t* in, const RowBlock& block,
                        int exponent, uint16_t* out) {
  const float first = std::ldexp(1.0f, exponent / 2);
  const float second = std::ldexp(1.0f, exponent - exponent / 2);
  ForEachRow(shape, block, [&](int64_t to, int64_t from) {
    for (int64_t d = 0; d < shape.dim; ++d) {
      out[to + d] = BFloat16FromFloat(FloatFromFloat16(in[from + d]) * first * second);
    }
  });
}

void PadRows(const RowShape& shape, const uint16_t* in, uint16_t* out) {
  for (int64_t b = 0; b < Entries(shape); ++b) {
    ForEachRow(shape, WholeEntry(shape, b), [&](int64_t from, int64_t to) {
      std::memcpy(out + to, in + from, shape.dim * 2);
      std::memset(out + to + shape.dim, 0, (PaddedDim(shape.dim) - shape.dim) * 2);
    });
  }
}

void UnpadRows(const RowShape& shape, const uint16_t* in, uint16_t* out) {
  for (int64_t b = 0; b < Entries(shape); ++b) {
    ForEachRow(shape, WholeEntry(shape, b),
               [&](int64_t to, int64_t from) { std::memcpy(out + to, in + from, shape.dim * 2); });
  }
}

}  // namespace attnd::cuda
