// float32 where device code reads and writes words of any element type (half_element.h): a word is
// one number, the "low" one; there is no "high" one. Errors: none. Threads: pure functions.
#pragma once

#include "kernels/ptx/instructions.h"

namespace attnd {

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  ATTN_HD static uint32_t Pack(float low, float) { return ptx::FloatBits(low); }
  // Word n of a row.
  ATTN_HD static uint32_t WordOf(const char* row, int n) {
    return ptx::LoadConstant32(row + n * 4);
  }
  ATTN_HD static float Low(uint32_t word) { return ptx::BitsFloat(word); }
  ATTN_HD static float High(uint32_t) { return 0; }
  // All ones in an infinity or NaN.
  ATTN_HD static uint32_t NonFinite(uint32_t word) {
    return (word & 0x7f800000u) == 0x7f800000u ? ~0u : 0u;
  }
};

}  // namespace attnd
