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

#include "kernels/rules/half_element.h"
#include "kernels/rules/params.h"

namespace attnd {

// Bits of floats ≥ 0: max‖dO‖², max|delta|; not 0 where rows are not finite (non_finite_rows.h);
// max‖V‖², max|K|. Then numbers that sm90's backward counts: blocks of dQ's sums (kDqBlockRows)
// that are zero, and runs of tiles of keys (kListRuns) whose gradients and sums of dQ are written.
enum GradientBound {
  kOutputGradientBound,
  kDeltaBound,
  kNonFiniteRows,
  kValueBound,
  kKeyBound,
  kZeroedBlocks,
  kWrittenTiles
};

ATTN_HD uint32_t* GradientBounds(const ProblemDesc& p, int batch, int kv_head) {
  return p.gradient_bounds + (int64_t{batch} * p.kv_heads + kv_head) * kGradientBoundWords;
}

ATTN_HD float PowerOfTwo(int exponent) {
  return ptx::BitsFloat(static_cast<uint32_t>(exponent + 127) << 23);
}

// Within 2^-20 of it.
ATTN_HD float SquareRoot(float x) { return ptx::Exp2(0.5f * ptx::Log2(x)); }

// `margin`: of the bound, for those who round dS up.
ATTN_HD int GradientExponent(const ProblemDesc& p, int batch, int kv_head, float margin) {
  const uint32_t* bounds = GradientBounds(p, batch, kv_head);
  const float d_o = ptx::BitsFloat(ptx::LoadConstant32(bounds + kOutputGradientBound));
  const float delta = ptx::BitsFloat(ptx::LoadConstant32(bounds + kDeltaBound));
  const float v = ptx::BitsFloat(ptx::LoadConstant32(bounds + kValueBound));
  const float bound = ptx::Fma(SquareRoot(d_o) * SquareRoot(v), p.dropout_scale, delta) * margin;
  const int exponent = (15 - (static_cast<int>(ptx::FloatBits(bound) >> 23) - 127)) & ~1;
  return exponent < -100 ? -100 : exponent > 60 ? 60 : exponent;
}

// Multiplies by factor·2^exponent and rounds to the call's element type.
class GradientWriter {
 public:
  ATTN_HD GradientWriter(const ProblemDesc& p, float factor, int exponent)
      : first_(factor * PowerOfTwo(Clip(exponent / 2))),
        second_(PowerOfTwo(Clip(exponent - exponent / 2))),
        is_bfloat16_(p.bfloat16_gradients) {}

  // Two neighbours in one word, where the element type has 16 bits.
  ATTN_HD uint32_t Pack(float low, float high) const {
    low = low * first_ * second_;
    high = high * first_ * second_;
    return is_bfloat16_ ? BFloat16::Pack(low, high) : Float16::Pack(low, high);
  }
  // The same of an element type that is known.
  template <class Element>
  ATTN_HD uint32_t PackAs(float low, float high) const {
    return Element::Pack(low * first_ * second_, high * first_ * second_);
  }
  // The same in float32.
  ATTN_HD uint2 Floats(float low, float high) const {
    return make_uint2(ptx::FloatBits(low * first_ * second_),
                      ptx::FloatBits(high * first_ * second_));
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
