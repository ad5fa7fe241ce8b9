// Activation functions and their slopes on vectors. Included once per Highway target; kernels/cpu
// only. Errors are absolute, a few float32 roundings of max(1, |x|); NaN stays NaN.
#if defined(ATTND_KERNELS_CPU_DENSE_CURVES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_DENSE_CURVES_INL_H_
#undef ATTND_KERNELS_CPU_DENSE_CURVES_INL_H_
#else
#define ATTND_KERNELS_CPU_DENSE_CURVES_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE FloatVector Constant(float value) { return hn::Set(FloatTag(), value); }

// 2^x, e^x; infinite beyond 2^127.
HWY_INLINE FloatVector PowerOfTwo(FloatVector x) {
  return hn::IfThenElse(hn::Gt(x, Constant(127.0f)), hn::Inf(FloatTag()), Exp2(x));
}
HWY_INLINE FloatVector Exponential(FloatVector x) {
  return PowerOfTwo(hn::Mul(x, Constant(0x1.715476p+0f)));
}

template <int kCount>
HWY_INLINE FloatVector Polynomial(FloatVector x, const float (&highest_first)[kCount]) {
  FloatVector p = Constant(highest_first[0]);
  for (int n = 1; n < kCount; ++n) p = hn::MulAdd(p, x, Constant(highest_first[n]));
  return p;
}

HWY_INLINE FloatVector Sigmoid(FloatVector x) {
  const FloatVector one = Constant(1);
  return hn::Div(one, hn::Add(one, Exponential(hn::Neg(x))));
}

// Near 0 x + x³·P(x²), else from the exponential.
HWY_INLINE FloatVector Tanh(FloatVector x) {
  const FloatVector size = hn::Abs(x), square = hn::Mul(x, x), one = Constant(1);
  static constexpr float kNear[] = {-0x1.69709ap-8f, 0x1.4f5ed6p-6f, -0x1.b7cfecp-5f,
                                    0x1.1103f2p-3f, -0x1.555524p-2f};
  const FloatVector near = hn::MulAdd(hn::Mul(x, square), Polynomial(square, kNear), x);
  const FloatVector two = Constant(2);
  const FloatVector power = Exponential(hn::Mul(two, size));
  const FloatVector far = hn::CopySign(hn::Sub(one, hn::Div(two, hn::Add(power, one))), x);
  return hn::IfThenElse(hn::Lt(size, Constant(0.65f)), near, hn::IfThenElse(hn::Eq(x, x), far, x));
}

// Φ(x) of the normal distribution is 1 / (1 + 2^(−x·P(x²))): weighted least errors of x·Φ(x) on
// |x| ≤ 6, 1.7e-7 of max(1, |x|); P grows on beyond. And its density.
struct Normal {
  FloatVector cumulative, density;
};
HWY_INLINE Normal NormalOf(FloatVector x) {
  static constexpr float kTerms[] = {
      0x1.a0f9dep-44f, -0x1.542994p-37f, 0x1.5afa66p-32f,  0x1.a09d84p-30f, -0x1.9f27a6p-22f,
      0x1.8c453ep-17f, -0x1.53f31cp-13f, -0x1.6f616ep-14f, 0x1.ad614cp-4f,  0x1.26aed6p+1f};
  const FloatVector one = Constant(1), square = hn::Mul(x, x);
  const FloatVector power = PowerOfTwo(hn::Mul(hn::Neg(x), Polynomial(square, kTerms)));
  return {hn::Div(one, hn::Add(one, power)),
          hn::Mul(Exponential(hn::Mul(Constant(-0.5f), square)), Constant(0x1.988454p-2f))};
}

// The gradient of a curve, given dy.
template <class Curve>
struct ByItsSlope {
  static FloatVector Gradient(FloatVector x, FloatVector dy) {
    return hn::Mul(dy, Curve::Slope(x));
  }
};

struct ReluCurve {
  static FloatVector Value(FloatVector x) {
    return hn::IfThenElse(hn::Le(x, hn::Zero(FloatTag())), hn::Zero(FloatTag()), x);
  }
  // dy or 0: an infinite dy is none where nothing goes through.
  static FloatVector Gradient(FloatVector x, FloatVector dy) {
    return hn::IfThenZeroElse(hn::Le(x, hn::Zero(FloatTag())), dy);
  }
};

struct GeluCurve : ByItsSlope<GeluCurve> {
  static FloatVector Value(FloatVector x) { return hn::Mul(x, NormalOf(x).cumulative); }
  static FloatVector Slope(FloatVector x) {
    const Normal normal = NormalOf(x);
    return hn::MulAdd(x, normal.density, normal.cumulative);
  }
};

// ½x(1 + tanh(u)), u = √(2/π)(x + 0.044715x³).
struct GeluTanhCurve : ByItsSlope<GeluTanhCurve> {
  static constexpr float kRoot = 0x1.988454p-1f, kCubic = 0.044715f;
  static FloatVector Argument(FloatVector x) {
    const FloatVector inner = hn::MulAdd(hn::Mul(x, x), Constant(kCubic), Constant(1));
    return hn::Mul(hn::Mul(Constant(kRoot), x), inner);
  }
  static FloatVector Value(FloatVector x) {
    // ½(1 + tanh(u)) = σ(2u), which keeps its digits where x is far below 0.
    return hn::Mul(x, Sigmoid(hn::Mul(Constant(2), Argument(x))));
  }
  static FloatVector Slope(FloatVector x) {
    const FloatVector s = Sigmoid(hn::Mul(Constant(2), Argument(x))), one = Constant(1);
    const FloatVector inner = hn::MulAdd(hn::Mul(x, x), Constant(3 * kCubic), one);
    const FloatVector steep = hn::Mul(hn::Mul(s, hn::Sub(one, s)), Constant(2 * kRoot));
    return hn::MulAdd(hn::Mul(x, steep), inner, s);
  }
};

// x·σ(c·x), c in 1/1000.
template <int kSlope>
struct GateCurve : ByItsSlope<GateCurve<kSlope>> {
  static FloatVector Gate(FloatVector x) { return Sigmoid(hn::Mul(Constant(kSlope / 1000.0f), x)); }
  static FloatVector Value(FloatVector x) { return hn::Mul(x, Gate(x)); }
  static FloatVector Slope(FloatVector x) {
    const FloatVector s = Gate(x);
    const FloatVector steep = hn::Mul(s, hn::Sub(Constant(1), s));
    return hn::MulAdd(hn::Mul(Constant(kSlope / 1000.0f), x), steep, s);
  }
};

struct TanhCurve : ByItsSlope<TanhCurve> {
  static FloatVector Value(FloatVector x) { return Tanh(x); }
  static FloatVector Slope(FloatVector x) {
    const FloatVector t = Tanh(x);
    return hn::NegMulAdd(t, t, Constant(1));
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
