// Volta's tensor cores, mma.sync.m8n8k4: four quad-pairs, each an 8×8×4 product of its own.
// Operands are float16; c += a·b. "Row" and "Col" name the layouts of a, then b; lane maps:
// kernels/sm70/tile_math.h. Newer GPUs run it exactly but slowly. All 32 lanes call together.
// Source: PTX ISA 8.8, "Matrix Fragments for mma.m8n8k4".
#pragma once

#include "base/hd.h"

#if !defined(__CUDACC_RTC__)
#include <host_mma_sm70.h>
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

#define ATTN_MMA_F32(layout)                                                             \
  asm volatile("mma.sync.aligned.m8n8k4." layout                                         \
               ".f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"           \
               "{%0,%1,%2,%3,%4,%5,%6,%7};"                                              \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
                 "+f"(c[6]), "+f"(c[7])                                                  \
               : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
ATTN_PTX void MmaRowCol(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  ATTN_MMA_F32("row.col");
}
ATTN_PTX void MmaRowRow(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  ATTN_MMA_F32("row.row");
}
ATTN_PTX void MmaColRow(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  ATTN_MMA_F32("col.row");
}
#undef ATTN_MMA_F32
// float16 accumulators: c[n] holds columns 2n (low half) and 2n + 1 of row t + 4h.
ATTN_PTX void MmaRowColHalf(uint32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 {%0,%1,%2,%3},{%4,%5},{%6,%7},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
