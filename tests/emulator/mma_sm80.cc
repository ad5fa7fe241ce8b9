#include "tests/emulator/mma_sm80.h"

#include "attention/element.h"
#include "tests/emulator/mma_sm70.h"

namespace attnd::emulator {
// Without branches, so that the compiler uses vectors.
float Widen(HalfKind kind, uint32_t half) {
  if (kind == HalfKind::kBFloat16) return FloatOf(half << 16);
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = BitsOf(FloatOf(magnitude << 13) * 0x1p112f);
  bits = magnitude >= 0x7c00 ? 0x7f800000u | (magnitude & 0x3ff) << 13 : bits;
  return FloatOf(bits | (half & 0x8000u) << 16);
}

namespace {

// D += A·B, rounded once.
template <int kDepth>
void Add(const double (&a)[16][kDepth], const double (&b)[kDepth][8], Mma16816* const lanes[32]) {
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    }
    for (int column = 0; column < 8; ++column) {
      float& d = lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
      d = TruncateToFloat(sum[column] + d);
    }
  }
}

}  // namespace

void Multiply16816(HalfKind kind, Mma16816* const lanes[32]) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int outer = lane / 4, inner = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int n = 0; n < 4; ++n) {  // n & 1: rows 8 to 15, n >> 1: columns 8 to 15
        a[outer + 8 * (n & 1)][inner + half + 8 * (n >> 1)] =
            Widen(kind, lanes[lane]->a[n] >> 16 * half & 0xffffu);
      }
      for (int n = 0; n < 2; ++n) {
        b[inner + half + 8 * n][outer] = Widen(kind, lanes[lane]->b[n] >> 16 * half & 0xffffu);
      }
    }
  }
  Add(a, b, lanes);
}

void Multiply1688(Mma16816* const lanes[32]) {
  auto value = [](uint32_t word) { return double{FloatOf(word & ~0x1fffu)}; };
  double a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int outer = lane / 4, inner = lane % 4;
    for (int n = 0; n < 4; ++n) {  // n & 1: rows 8 to 15, n >> 1: columns 4 to 7
      a[outer + 8 * (n & 1)][inner + 4 * (n >> 1)] = value(lanes[lane]->a[n]);
    }
    for (int n = 0; n < 2; ++n) b[inner + 4 * n][outer] = value(lanes[lane]->b[n]);
  }
  Add(a, b, lanes);
}

}  // namespace attnd::emulator
