// The power of two by which backward keeps dS inside float16, one for each (batch entry, KV head).
//   |dS| ≤ |Z∘dP| + |delta| ≤ Z·max‖dO‖·max‖V‖ + max|delta| =: bound,  bound·2^exponent < 2^16
// over finite numbers only: what is infinite or NaN surfaces by itself and must not move others.
// float16 then holds dS down to 2^-39 of the bound, whatever the loss was scaled by. Exact: the
// last factors take it back. Exponents are even, so that a key which a bool mask or a
// bias hides can hardly change another's bits; keys beyond a window or diagonal are not counted at
// all.
//
// DeltaKernel collects the maxima (a maximum does not depend on order); the kernels after it
// call GradientExponent. GradientWriter brings gradients into the call's element type.
// Errors: none. Threads: pure functions.
#pragma once

#include "kernels/ptx/instructions.h"
#include "kernels/rules/params.h"

namespace attnd {

// Bits of floats ≥ 0: max‖dO‖², max|delta|, max‖V‖², max|K|. The last is 1 where rows
// are not finite (kernels/sm70/backward_non_finite.h).
enum GradientBound { kOutputGradientBound, kDeltaBound, kValueBound, kKeyBound, kNonFiniteRows };

ATTN_HD uint32_t* GradientBounds(const ProblemDesc& p, int batch, int kv_head) {
  return p.gradient_bounds + (int64_t{batch} * p.kv_heads + kv_head) * kGradientBoundWords;
}

ATTN_HD float PowerOfTwo(int exponent) {
  return ptx::BitsFloat(static_cast<uint32_t>(exponent + 127) << 23);
}

// Within 2^-20 of it.
ATTN_HD float SquareRoot(float x) { return ptx::Exp2(0.5f * ptx::Log2(x)); }

ATTN_HD int GradientExponent(const ProblemDesc& p, int batch, int kv_head) {
  const uint32_t* bounds = GradientBounds(p, batch, kv_head);
  const float d_o = ptx::BitsFloat(ptx::LoadConstant32(bounds + kOutputGradientBound));
  const float delta = ptx::BitsFloat(ptx::LoadConstant32(bounds + kDeltaBound));
  const float v = ptx::BitsFloat(ptx::LoadConstant32(bounds + kValueBound));
  const float bound = ptx::Fma(SquareRoot(d_o) * SquareRoot(v), p.dropout_scale, delta);
  const int exponent = (15 - (static_cast<int>(ptx::FloatBits(bound) >> 23) - 127)) & ~1;
  return exponent < -100 ? -100 : exponent > 60 ? 60 : exponent;
}

// The upper half is the bfloat16: to nearest, ties to even; NaN stays NaN.
ATTN_HD uint32_t BFloat16InUpperHalf(float value) {
  const uint32_t bits = ptx::FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff0000u;
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

// Multiplies by factor·2^exponent and rounds to the call's element type.
class GradientWriter {
 public:
  ATTN_HD GradientWriter(const ProblemDesc& p, float factor, int exponent)
      : first_(factor * PowerOfTwo(Clip(exponent / 2))),
        second_(PowerOfTwo(Clip(exponent - exponent / 2))),
        is_bfloat16_(p.bfloat16_gradients) {}

  // Two neighbours in one word.
  ATTN_HD uint32_t Pack(float low, float high) const {
    low = low * first_ * second_;
    high = high * first_ * second_;
    if (!is_bfloat16_) return ptx::PackRounded(low, high);
    return BFloat16InUpperHalf(low) >> 16 | (BFloat16InUpperHalf(high) & 0xffff0000u);
  }

 private:
  // One factor alone may lie beyond float32 where the product of both does not.
  ATTN_HD static int Clip(int exponent) {
    return exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  }

  float first_, second_;
  bool is_bfloat16_;
};

}  // namespace attnd
