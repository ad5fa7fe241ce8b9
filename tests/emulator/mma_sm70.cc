#include "tests/emulator/mma_sm70.h"

#include <cmath>
#include <cstring>

#include "attention/element.h"

namespace attnd::emulator {
namespace {

struct Operands {
  float a[4][8][4];  // [quad-pair][row][k]
  float b[4][4][8];  // [quad-pair][k][column]
};

// 128 halves at once, without branches, so that the compiler uses vectors.
void WidenHalves(const uint16_t (&halves)[128], float (&out)[128]) {
  for (int i = 0; i < 128; ++i) {
    uint32_t magnitude = halves[i] & 0x7fffu;
    uint32_t bits = BitsOf(FloatOf(magnitude << 13) * 0x1p112f);
    bits = magnitude >= 0x7c00 ? 0x7f800000u | (magnitude & 0x3ff) << 13 : bits;
    out[i] = FloatOf(bits | uint32_t{halves[i] & 0x8000u} << 16);
  }
}

template <class Lane>
void Gather(Major a_major, Major b_major, Lane* const lanes[32], Operands& out) {
  uint16_t halves[128];
  float wide[128];
  for (int lane = 0; lane < 32; ++lane) std::memcpy(halves + 4 * lane, lanes[lane]->a, 8);
  WidenHalves(halves, wide);
  for (int i = 0; i < 128; ++i) {
    FragmentPlace at = PlaceInA(a_major, i / 4, i % 4);
    out.a[QuadPair(i / 4)][at.row][at.column] = wide[i];
  }
  for (int lane = 0; lane < 32; ++lane) std::memcpy(halves + 4 * lane, lanes[lane]->b, 8);
  WidenHalves(halves, wide);
  for (int i = 0; i < 128; ++i) {
    FragmentPlace at = PlaceInB(b_major, i / 4, i % 4);
    out.b[QuadPair(i / 4)][at.row][at.column] = wide[i];
  }
}

// sum[q][row][column] += a·b. A product of two f16 has 22 bits and 2^-48 as its smallest step, so
// a double holds these sums exactly but for cancellations beyond 2^53, which no f16 data reaches.
void AddProducts(const Operands& in, double (&sum)[4][8][8]) {
  for (int q = 0; q < 4; ++q) {
    for (int row = 0; row < 8; ++row) {
      for (int k = 0; k < 4; ++k) {
        double a = in.a[q][row][k];
        for (int column = 0; column < 8; ++column) sum[q][row][column] += a * in.b[q][k][column];
      }
    }
  }
}

}  // namespace

float TruncateToFloat(double value) {
  float nearest = static_cast<float>(value);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) {
    return FloatOf(BitsOf(nearest) - 1);  // one step toward zero; infinity becomes the largest
  }
  return nearest;
}

uint16_t RoundToHalf(double value) {
  // Rounding to odd first keeps what the second rounding must know.
  float truncated = TruncateToFloat(value);
  if (static_cast<double>(truncated) != value && value == value) {
    truncated = FloatOf(BitsOf(truncated) | 1);
  }
  return Float16FromFloat(truncated);
}

void MultiplyF32(Major a, Major b, Mma32* const lanes[32]) {
  Operands in;
  Gather(a, b, lanes, in);
  double sum[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      FragmentPlace at = PlaceInC32(lane, e);
      sum[QuadPair(lane)][at.row][at.column] = lanes[lane]->d[e];
    }
  }
  AddProducts(in, sum);
  float rounded[4][8][8];
  for (int i = 0; i < 256; ++i) (&rounded[0][0][0])[i] = TruncateToFloat((&sum[0][0][0])[i]);
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      FragmentPlace at = PlaceInC32(lane, e);
      lanes[lane]->d[e] = rounded[QuadPair(lane)][at.row][at.column];
    }
  }
}

void MultiplyF16(Major a, Major b, Mma16* const lanes[32]) {
  Operands in;
  Gather(a, b, lanes, in);
  double sum[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      FragmentPlace at = PlaceInC16(lane, e);
      uint32_t pair = lanes[lane]->d[e / 2];
      sum[QuadPair(lane)][at.row][at.column] =
          FloatFromFloat16(static_cast<uint16_t>(e % 2 == 0 ? pair : pair >> 16));
    }
  }
  AddProducts(in, sum);
  for (int lane = 0; lane < 32; ++lane) {
    for (int e = 0; e < 8; ++e) {
      FragmentPlace at = PlaceInC16(lane, e);
      uint32_t half = RoundToHalf(sum[QuadPair(lane)][at.row][at.column]);
      uint32_t& pair = lanes[lane]->d[e / 2];
      pair = e % 2 == 0 ? (pair & 0xffff0000u) | half : (pair & 0xffffu) | half << 16;
    }
  }
}

}  // namespace attnd::emulator
