// float32 on m8n8k4 of float16: x = high + low, both float16, and
//   a·b = low·high + high·low + high·high
// exact to about 2^-21 of |a|·|b|. The host brings rows so (kernels/cuda/layout/staging.h): four
// numbers of a row are one 16-byte chunk, of which the first half holds the high parts and the
// second half the low ones, times a power of two. So one LDS.128 is both parts of an operand.
//
// The tensor core truncates what it adds up. Low products, 2^-11 as large, have sums of their own;
// high ones are taken to a float32 sum every few links. Errors: none.
#pragma once

#include "kernels/rules/float_element.h"
#include "kernels/rules/online_softmax.h"
#include "kernels/rules/row_math.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

// A float32 row as the host brings it, where what is not finite is looked for.
struct SplitFloat32 : Float32 {
  // Bits of number n of a row; of a finite one its high part's.
  ATTN_HD static uint32_t WordOf(const char* row, int n) {
    const uint32_t pair = ptx::LoadConstant32(row + (n >> 2) * 16 + (n >> 1 & 1) * 4);
    return ptx::FloatBits(n & 1 ? ptx::HighHalf(pair) : ptx::LowHalf(pair));
  }
};

struct SplitAccumulate : Float32Accumulate {
  static constexpr bool kSplits = true;
  using Operand = SplitFloat32;
};

// The sum over a chunk of both parts' products, in float32, where infinities and NaN are what they
// are.
ATTN_HD float SplitDot(uint4 a, uint4 b, float sum) {
  const uint32_t of_a[2][2] = {{a.x, a.y}, {a.z, a.w}}, of_b[2][2] = {{b.x, b.y}, {b.z, b.w}};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    sum = ptx::Fma(ptx::LowHalf(of_a[0][n]) + ptx::LowHalf(of_a[1][n]),
                   ptx::LowHalf(of_b[0][n]) + ptx::LowHalf(of_b[1][n]), sum);
    sum = ptx::Fma(ptx::HighHalf(of_a[0][n]) + ptx::HighHalf(of_a[1][n]),
                   ptx::HighHalf(of_b[0][n]) + ptx::HighHalf(of_b[1][n]), sum);
  }
  return sum;
}

// SplitP says how backward splits P: as large as float16 allows beside what an lse may be off by,
// so that low parts keep their bits.
struct SplitP : RoundedP {
  static constexpr int kShift = 5;  // beyond kProbabilityShift
  static constexpr float kBias = kShift;
};

// Two numbers as float16: high parts truncated, and what that leaves to nearest.
struct SplitPair {
  uint32_t high, low;
};
ATTN_HD SplitPair SplitNumbers(float first, float second) {
  constexpr uint32_t kRest = 0x1fffu;  // bits of a float32 that a float16 lacks
  const float low = first - ptx::BitsFloat(ptx::FloatBits(first) & ~kRest);
  const float next = second - ptx::BitsFloat(ptx::FloatBits(second) & ~kRest);
  return {ptx::PackTruncated(first, second), ptx::PackRounded(low, next)};
}

}  // namespace attnd::sm70

namespace attnd {

// All ones in the places of a chunk's numbers that are an infinity or NaN.
template <>
ATTN_HD uint4 NonFiniteHalves<sm70::SplitFloat32>(uint4 chunk) {
  const uint32_t first = Float16::NonFinite(chunk.x), second = Float16::NonFinite(chunk.y);
  return make_uint4(ptx::Permute(first, 0, 0x1010u), ptx::Permute(first, 0, 0x3232u),
                    ptx::Permute(second, 0, 0x1010u), ptx::Permute(second, 0, 0x3232u));
}
// The low part of what is not finite is zero.
template <>
ATTN_HD uint4 FiniteHalves<sm70::SplitFloat32>(uint4 chunk) {
  return FiniteHalves<Float16>(chunk);
}
template <>
ATTN_HD float DotOfChunks<sm70::SplitFloat32>(uint4 a, uint4 b, float sum) {
  return sm70::SplitDot(a, b, sum);
}
template <>
struct RowMath<sm70::SplitFloat32> {
  // The largest high part serves, since high parts are as large as their numbers.
  ATTN_HD static float Max(uint4 chunk) {
    return RowMath<Float16>::Max(make_uint4(chunk.x, chunk.y, 0, 0));
  }
  ATTN_HD static float FiniteMax(uint4 chunk) { return Max(FiniteHalves<Float16>(chunk)); }
  ATTN_HD static float Dot(uint4 a, uint4 b) { return sm70::SplitDot(a, b, 0); }
  ATTN_HD static float Norm(uint4 chunk) { return Dot(chunk, chunk); }
  ATTN_HD static float FiniteNorm(uint4 chunk) { return Norm(FiniteHalves<Float16>(chunk)); }
  ATTN_HD static float SumOfQuad(float x) { return RowMath<Float16>::SumOfQuad(x); }
};

}  // namespace attnd
