// Backward's arithmetic between its products: scores to P, P and dP to dS, in the accumulator
// layout of kKeyTiles tiles of 16 keys × 16 queries (rows are keys, columns queries). Errors: none.
#pragma once

#include "kernels/sm70/backward_dropout.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

// The exponent of P, or Z∘dP − delta as far as nothing was dropped.
template <int kKeyTiles>
ATTN_HD void Subtract(float multiplier, const float2 (&rows)[2], float (&rS)[kKeyTiles][8]) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = Float32Accumulate::Element(r, 2 * k);
        rS[m][e] = ptx::Fma(rS[m][e], multiplier, -rows[k].x);
        rS[m][e + 1] = ptx::Fma(rS[m][e + 1], multiplier, -rows[k].y);
      }
    }
  }
}

template <int kKeyTiles>
ATTN_HD void MakeP(const float (&rS)[kKeyTiles][8], uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int e = Float32Accumulate::Element(n & 1, n & 2);
      words[m][n] = ptx::PackTruncated(ptx::Exp2(rS[m][e]), ptx::Exp2(rS[m][e + 1]));
    }
  }
}

template <int kKeyTiles>
ATTN_HD void HideInvisible(uint32_t visible, uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t pair = visible >> (8 * m + Float32Accumulate::Element(n & 1, n & 2));
      words[m][n] &= (pair & 1 ? 0x0000ffffu : 0) | (pair & 2 ? 0xffff0000u : 0);
    }
  }
}

// dS = P∘(Z∘dP − delta), in float16. `rS` holds that difference as if nothing had been dropped.
template <class DropoutPolicy, int kKeyTiles>
ATTN_HD void MakeDs(const float (&rS)[kKeyTiles][8], const float2 (&delta)[2], const char* hand,
                    uint32_t (&words)[kKeyTiles][4]) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
    const uint4 handed = ptx::LoadShared128(hand + m * 512);
    const uint32_t p[4] = {handed.x, handed.y, handed.z, handed.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int e = Float32Accumulate::Element(n & 1, n & 2);
      const float low = DropoutPolicy::Kept(p[n] & 0x8000u, rS[m][e], -delta[n >> 1].x);
      const float high = DropoutPolicy::Kept(p[n] & 0x80000000u, rS[m][e + 1], -delta[n >> 1].y);
      const uint32_t positive = DropoutPolicy::Unmarked(p[n]);
      words[m][n] =
          ptx::PackTruncated(ptx::LowHalf(positive) * low, ptx::HighHalf(positive) * high);
    }
  }
}
template <int kKeyTiles>
ATTN_HD void StoreP(const uint32_t (&marked)[kKeyTiles][4], char* to) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
    ptx::StoreShared128(to + m * 512,
                        make_uint4(marked[m][0], marked[m][1], marked[m][2], marked[m][3]));
  }
}
// `a`: [key tile][own queries, then the other half's][k step][register]. Own queries of each key
// are stored, four of either k step.
template <int kKeyTiles>
ATTN_HD void StoreDs(const uint32_t (&a)[kKeyTiles][2][2][2], char* to) {
#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m) {
    const uint32_t(&own)[2][2] = a[m][0];
    ptx::StoreShared128(to + m * 16 * 128, make_uint4(own[0][0], own[0][1], own[1][0], own[1][1]));
  }
}

// All ones where a non-negative float16 is not zero.
ATTN_HD uint32_t NonZeroHalves(uint32_t word) {
  return (word & 0xffffu ? 0xffffu : 0u) | (word >> 16 ? 0xffff0000u : 0u);
}
ATTN_HD void MultiplySlope(const char* ds, uint32_t (&words)[4]) {
  const uint4 slope = ptx::LoadShared128(ds);
  const uint32_t slopes[4] = {slope.x, slope.y, slope.z, slope.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t s = slopes[(n >> 1) * 2 + (n & 1)];
    words[n] = ptx::PackRounded(ptx::LowHalf(words[n]) * ptx::LowHalf(s),
                                ptx::HighHalf(words[n]) * ptx::HighHalf(s));
  }
}

}  // namespace attnd::sm70
