// The 16-bit element types as device code reads and writes them, two numbers in a word, the first
// in the low half. Errors: none. Threads: pure functions.
#pragma once

#include "kernels/ptx/instructions.h"

namespace attnd {

// All ones in those halves of a word whose exponent is all ones (an infinity or NaN): `exponents`
// + `carry` carries into the sign's place, which is then spread.
ATTN_HD uint32_t FullExponents(uint32_t word, uint32_t exponents, uint32_t carry) {
  return ptx::Permute((word & exponents) + carry, 0, 0xbb99u);
}

// The upper half is the bfloat16: to nearest, ties to even; NaN stays NaN.
ATTN_HD uint32_t BFloat16InUpperHalf(float value) {
  const uint32_t bits = ptx::FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff0000u;
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;  // of a word: all but signs
  // Rounds to nearest, ties to even.
  ATTN_HD static uint32_t Pack(float low, float high) { return ptx::PackRounded(low, high); }
  // Word n of a row.
  ATTN_HD static uint32_t WordOf(const char* row, int n) {
    return ptx::LoadConstant32(row + n * 4);
  }
  ATTN_HD static float Low(uint32_t word) { return ptx::LowHalf(word); }
  ATTN_HD static float High(uint32_t word) { return ptx::HighHalf(word); }
  // All ones in those halves that are an infinity or NaN.
  ATTN_HD static uint32_t NonFinite(uint32_t word) {
    return FullExponents(word, 0x7c007c00u, 0x04000400u);
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  // Likewise; NaN stays NaN.
  ATTN_HD static uint32_t Pack(float low, float high) {
    return BFloat16InUpperHalf(low) >> 16 | (BFloat16InUpperHalf(high) & 0xffff0000u);
  }
  // Word n of a row.
  ATTN_HD static uint32_t WordOf(const char* row, int n) {
    return ptx::LoadConstant32(row + n * 4);
  }
  ATTN_HD static float Low(uint32_t word) { return ptx::BitsFloat(word << 16); }
  ATTN_HD static float High(uint32_t word) { return ptx::BitsFloat(word & 0xffff0000u); }
  ATTN_HD static uint32_t NonFinite(uint32_t word) {
    return FullExponents(word, 0x7f807f80u, 0x00800080u);
  }
};

template <class Element>
ATTN_HD uint4 NonFiniteHalves(uint4 words) {
  return make_uint4(Element::NonFinite(words.x), Element::NonFinite(words.y),
                    Element::NonFinite(words.z), Element::NonFinite(words.w));
}
// Zero in place of those.
template <class Element>
ATTN_HD uint4 FiniteHalves(uint4 words) {
  const uint4 bad = NonFiniteHalves<Element>(words);
  return make_uint4(words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w);
}

// sum + a·b, the last numbers first.
template <class Element>
ATTN_HD float DotOfWords(uint32_t a, uint32_t b, float sum) {
  return ptx::Fma(Element::Low(a), Element::Low(b),
                  ptx::Fma(Element::High(a), Element::High(b), sum));
}
template <class Element>
ATTN_HD float DotOfChunks(uint4 a, uint4 b, float sum) {
  sum = DotOfWords<Element>(a.z, b.z, DotOfWords<Element>(a.w, b.w, sum));
  return DotOfWords<Element>(a.x, b.x, DotOfWords<Element>(a.y, b.y, sum));
}

}  // namespace attnd
