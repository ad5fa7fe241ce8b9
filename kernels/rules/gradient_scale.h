// The power of two by which backward keeps dS of a tile of 64 rows inside float16.
//   |dS| ≤ |Z∘dP| + |delta| ≤ Z·‖dO‖·‖V‖ + |delta| =: bound of a row,  bound·2^gain < 2^16
// over what the tile's rows see, and over finite numbers only: what is infinite or NaN surfaces by
// itself and must not move others. float16 then holds dS down to 2^-36 of the tile's bound,
// whatever the loss was scaled by. Exact: the last factors take it back. Gains are multiples of
// kGainStep, so that nearly always all tiles of a KV head have one; where they differ, backward
// scales its sums of dK from step to step.
//
// DeltaKernel writes the gains; the kernels after it read them. GradientWriter brings gradients
// into the call's element type. Errors: none. Threads: pure functions.
#pragma once

#include "kernels/rules/half_element.h"
#include "kernels/rules/params.h"

namespace attnd {

// Bits of floats ≥ 0: not 0 where rows are not finite (non_finite_rows.h); kGainZero plus the
// highest gain of the head, and less the lowest. Then numbers that sm90's backward counts: blocks
// of dQ's sums (kDqBlockRows) that are zero, and runs of tiles of keys (kListRuns) whose gradients
// and sums of dQ are written.
enum GradientBound { kNonFiniteRows, kHighestGain, kLowestGain, kZeroedBlocks, kWrittenTiles };

ATTN_HD uint32_t* GradientBounds(const ProblemDesc& p, int batch, int kv_head) {
  return p.gradient_bounds + (int64_t{batch} * p.kv_heads + kv_head) * kGradientBoundWords;
}

ATTN_HD float PowerOfTwo(int exponent) {
  return ptx::BitsFloat(static_cast<uint32_t>(exponent + 127) << 23);
}

// The root is right to 2^-20 of itself.
ATTN_HD float SquareRoot(float x) { return ptx::Exp2(0.5f * ptx::Log2(x)); }

ATTN_HD int FloatExponent(float x) {
  return static_cast<int>(ptx::FloatBits(x) >> 23 & 255u) - 127;
}

inline constexpr int kGainStep = 4;
inline constexpr int kNoGain = 127;  // of a tile whose dS is 0
inline constexpr float kGainZero = 128;
ATTN_HD int GainOf(float bound) {
  if (bound == 0) return kNoGain;
  const int exponent = (15 - FloatExponent(bound)) & -kGainStep;
  return exponent < -100 ? -100 : exponent > 60 ? 60 : exponent;
}
ATTN_HD int32_t* GainsOfHead(const ProblemDesc& p, int batch, int head) {
  return p.gains + (int64_t{batch} * p.q_heads + head) * p.gains_head;
}
ATTN_HD int GainOfTile(const ProblemDesc& p, int batch, int head, int tile) {
  return static_cast<int32_t>(ptx::LoadConstant32(GainsOfHead(p, batch, head) + tile));
}

// The gains of a KV head's tiles.
struct HeadGains {
  int lowest;
  bool differ;
  ATTN_HD HeadGains(const ProblemDesc& p, int batch, int kv_head) : lowest(0), differ(false) {
    const uint32_t* bounds = GradientBounds(p, batch, kv_head);
    const float high = ptx::BitsFloat(ptx::LoadConstant32(bounds + kHighestGain));
    const float low = ptx::BitsFloat(ptx::LoadConstant32(bounds + kLowestGain));
    if (low == 0) return;  // no tile has one
    lowest = static_cast<int>(kGainZero - low);
    differ = high + low != 2 * kGainZero;
  }
};

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
