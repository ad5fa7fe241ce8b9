// Activation functions and their slopes: the equations of kernels/cpu/dense/curves-inl.h. Errors
// are absolute, a few float32 roundings of max(1, |x|); NaN stays NaN. Pure functions.
#pragma once

#include "kernels/ptx/scalar_instructions.h"

namespace attnd {

// e^x; infinite where float32 has none.
ATTN_HD float CurveExponential(float x) { return ptx::Exp2(ptx::Multiply(x, 0x1.715476p+0f)); }

template <int kCount>
ATTN_HD float CurvePolynomial(float x, const float (&highest_first)[kCount]) {
  float p = highest_first[0];
  for (int n = 1; n < kCount; ++n) p = ptx::Fma(p, x, highest_first[n]);
  return p;
}

ATTN_HD float Sigmoid(float x) { return ptx::Reciprocal(ptx::Add(1, CurveExponential(-x))); }

// Near 0 the result is x + x³·P(x²), elsewhere it comes from the exponential.
ATTN_HD float CurveTanh(float x) {
  const float near_terms[] = {-0x1.69709ap-8f, 0x1.4f5ed6p-6f, -0x1.b7cfecp-5f, 0x1.1103f2p-3f,
                              -0x1.555524p-2f};
  const float size = ptx::Absolute(x), square = ptx::Multiply(x, x);
  if (size < 0.65f) {
    return ptx::Fma(ptx::Multiply(x, square), CurvePolynomial(square, near_terms), x);
  }
  if (x != x) return x;
  const float power = CurveExponential(2 * size);
  const float far = ptx::Subtract(1, 2 * ptx::Reciprocal(ptx::Add(power, 1)));
  return x < 0 ? -far : far;
}

// Φ(x) of the normal distribution is 1 / (1 + 2^(−x·P(x²))): weighted least errors of x·Φ(x) on
// |x| ≤ 6, 1.7e-7 of max(1, |x|); P grows on beyond. And its density.
ATTN_HD float NormalCumulative(float x) {
  const float terms[] = {0x1.a0f9dep-44f,  -0x1.542994p-37f, 0x1.5afa66p-32f,  0x1.a09d84p-30f,
                         -0x1.9f27a6p-22f, 0x1.8c453ep-17f,  -0x1.53f31cp-13f, -0x1.6f616ep-14f,
                         0x1.ad614cp-4f,   0x1.26aed6p+1f};
  const float power = ptx::Multiply(-x, CurvePolynomial(ptx::Multiply(x, x), terms));
  return ptx::Reciprocal(ptx::Add(1, ptx::Exp2(power)));
}
ATTN_HD float NormalDensity(float x) {
  const float power = ptx::Exp2(ptx::Multiply(x, ptx::Multiply(x, -0x1.715476p-1f)));
  return ptx::Multiply(power, 0x1.988454p-2f);
}

// x·σ(c·x).
ATTN_HD float GateValue(float c, float x) { return ptx::Multiply(x, Sigmoid(ptx::Multiply(c, x))); }
ATTN_HD float GateSlope(float c, float x) {
  const float argument = ptx::Multiply(c, x), s = Sigmoid(argument);
  return ptx::Fma(argument, ptx::Multiply(s, ptx::Subtract(1, s)), s);
}

// ½x(1 + tanh(u)) = x·σ(2u), u = √(2/π)(x + 0.044715x³).
inline constexpr float kGeluRoot = 0x1.988454p-1f, kGeluCubic = 0.044715f, kQuickGelu = 1.702f;
ATTN_HD float GeluTanhGate(float x) {
  const float inner = ptx::Fma(ptx::Multiply(x, x), kGeluCubic, 1);
  return Sigmoid(2 * ptx::Multiply(ptx::Multiply(kGeluRoot, x), inner));
}
ATTN_HD float GeluTanhSlope(float x) {
  const float s = GeluTanhGate(x);
  const float inner = ptx::Fma(ptx::Multiply(x, x), 3 * kGeluCubic, 1);
  const float steep = ptx::Multiply(ptx::Multiply(s, ptx::Subtract(1, s)), 2 * kGeluRoot);
  return ptx::Fma(ptx::Multiply(x, steep), inner, s);
}

// Curve's numbers (operands.h).
enum CurveCode : int32_t {
  kCurveRelu = 1,
  kCurveGelu,
  kCurveGeluTanh,
  kCurveSilu,
  kCurveQuickGelu,
  kCurveTanh
};

// curve(x), and dy · the slope of the curve at x: ReLU lets dy pass or not: an infinite
// one is none where nothing goes through.
template <int32_t kCurve>
ATTN_HD float CurveValue(float x) {
  if constexpr (kCurve == kCurveRelu) {
    return x <= 0 ? 0 : x;
  } else if constexpr (kCurve == kCurveGelu) {
    return ptx::Multiply(x, NormalCumulative(x));
  } else if constexpr (kCurve == kCurveGeluTanh) {
    return ptx::Multiply(x, GeluTanhGate(x));
  } else if constexpr (kCurve == kCurveSilu) {
    return GateValue(1, x);
  } else if constexpr (kCurve == kCurveQuickGelu) {
    return GateValue(kQuickGelu, x);
  } else {
    return CurveTanh(x);
  }
}
template <int32_t kCurve>
ATTN_HD float SlopeTimes(float x, float dy) {
  if constexpr (kCurve == kCurveRelu) {
    return x <= 0 ? 0 : dy;
  } else if constexpr (kCurve == kCurveGelu) {
    return ptx::Multiply(dy, ptx::Fma(x, NormalDensity(x), NormalCumulative(x)));
  } else if constexpr (kCurve == kCurveGeluTanh) {
    return ptx::Multiply(dy, GeluTanhSlope(x));
  } else if constexpr (kCurve == kCurveSilu) {
    return ptx::Multiply(dy, GateSlope(1, x));
  } else if constexpr (kCurve == kCurveQuickGelu) {
    return ptx::Multiply(dy, GateSlope(kQuickGelu, x));
  } else {
    const float t = CurveTanh(x);
    return ptx::Multiply(dy, ptx::Fma(-t, t, 1));
  }
}

// body(Curve) with the curve as a constant, so that a loop within asks for it once.
template <int32_t kCurve>
struct KnownCurve {
  static constexpr int32_t kCode = kCurve;
};
template <class Body>
ATTN_HD void WithCurve(int32_t curve, const Body& body) {
  switch (curve) {
    case kCurveRelu:
      return body(KnownCurve<kCurveRelu>());
    case kCurveGelu:
      return body(KnownCurve<kCurveGelu>());
    case kCurveGeluTanh:
      return body(KnownCurve<kCurveGeluTanh>());
    case kCurveSilu:
      return body(KnownCurve<kCurveSilu>());
    case kCurveQuickGelu:
      return body(KnownCurve<kCurveQuickGelu>());
    default:
      return body(KnownCurve<kCurveTanh>());
  }
}

}  // namespace attnd
