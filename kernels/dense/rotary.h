// RotaryKernel: pairs of numbers of heads turned in place (RotaryDesc):
//   a' = a·c − b·s, b' = b·c + a·s     (c, s) = factor·(cos, sin)(position·frequency)
// The angle is float32; cosine and sine are made in float64, then rounded. A thread turns one pair
// of all heads of a row.
#pragma once

#include "kernels/dense/elements.h"

namespace attnd {

struct SineCosine {
  double sine, cosine;
};
// Sine and cosine are right to a few units of float64 for angles below 2^50; beyond, they are those
// of some finite angle. Source: the polynomials of fdlibm's k_sin.c and k_cos.c, on x − k·π/2 (Cody
// and Waite).
ATTN_HD SineCosine SineCosineOf(float angle) {
  constexpr double kHalfPiHigh = 0x1.921fb54442d18p+0, kHalfPiLow = 0x1.1a62633145c07p-54;
  const double limit = 0x1p50;
  double x = angle;
  if (x > limit) x = limit;
  if (x < -limit) x = -limit;
  const double k = ptx::RoundDouble(ptx::MultiplyDouble(x, 0x1.45f306dc9c883p-1));
  const double r = ptx::FmaDouble(-k, kHalfPiLow, ptx::FmaDouble(-k, kHalfPiHigh, x));
  const double z = ptx::MultiplyDouble(r, r);
  const double sines[] = {0x1.5d93a5acfd57cp-33,  -0x1.ae5e68a2b9cebp-26, 0x1.71de357b1fe7dp-19,
                          -0x1.a01a019c161d5p-13, 0x1.111111110f8a6p-7,   -0x1.5555555555549p-3};
  const double cosines[] = {-0x1.8fae9be8838d4p-37, 0x1.1ee9ebdb4b1c4p-29,  -0x1.27e4f809c52adp-22,
                            0x1.a01a019cb159p-16,   -0x1.6c16c16c15177p-10, 0x1.555555555554cp-5};
  double s = sines[0], c = cosines[0];
  for (int n = 1; n < 6; ++n) {
    s = ptx::FmaDouble(s, z, sines[n]);
    c = ptx::FmaDouble(c, z, cosines[n]);
  }
  const double sine = ptx::FmaDouble(ptx::MultiplyDouble(s, z), r, r);
  const double cosine = ptx::FmaDouble(ptx::MultiplyDouble(c, z), z, ptx::FmaDouble(-0.5, z, 1.0));
  const auto quarter = static_cast<int>(static_cast<int64_t>(k) & 3);
  const bool turned = (quarter & 1) != 0;
  const double of_sine = turned ? cosine : sine, of_cosine = turned ? sine : cosine;
  return {quarter >= 2 ? -of_sine : of_sine, quarter == 1 || quarter == 2 ? -of_cosine : of_cosine};
}

struct RotaryKernel {
  static constexpr int kThreads = kRotaryThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const RotaryDesc& d = *static_cast<const RotaryDesc*>(params.dense);
    const int64_t index = int64_t{at.block} * kThreads + at.thread;
    if (index >= d.rows * d.count) return;
    const int64_t row = index / d.count;
    const auto n = static_cast<int>(index - row * d.count);
    const float position = static_cast<float>(ptx::LoadGlobal32(d.positions + row));
    const SineCosine turn =
        SineCosineOf(ptx::Multiply(position, ptx::LoadGlobalFloat(d.frequency + n)));
    const auto cosine = static_cast<float>(ptx::MultiplyDouble(d.factor, turn.cosine));
    const auto sine = static_cast<float>(ptx::MultiplyDouble(d.factor, turn.sine));
    const int first = d.is_interleaved != 0 ? 2 * n : n;
    const int second = d.is_interleaved != 0 ? first + 1 : first + d.count;
    for (int head = 0; head < d.head_count; head += kTogether) {
      const int64_t begin = (row * d.head_count + head) * d.dim;
      Turn(d, d.head_count - head, begin + first, begin + second, cosine,
           d.is_backward != 0 ? -sine : sine);
    }
  }

 private:
  static constexpr int kTogether = 8;  // heads whose loads wait together

  ATTN_HD static void Turn(const RotaryDesc& d, int heads, int64_t first, int64_t second, float c,
                           float s) {
    float a[kTogether], b[kTogether];
    LoadNumbers(d.heads, heads, Strided{first, d.dim}, a);
    LoadNumbers(d.heads, heads, Strided{second, d.dim}, b);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (n >= heads) break;
      const int64_t ahead = int64_t{n} * d.dim;
      StoreNumber(d.heads.data, d.heads.element, first + ahead,
                  ptx::Subtract(ptx::Multiply(a[n], c), ptx::Multiply(b[n], s)));
      StoreNumber(d.heads.data, d.heads.element, second + ahead,
                  ptx::Add(ptx::Multiply(b[n], c), ptx::Multiply(a[n], s)));
    }
  }
};

}  // namespace attnd
