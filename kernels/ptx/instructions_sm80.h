// The instructions that sm_80 adds and the kernels use, one function each, as in instructions.h:
// mma.sync.m16n8k16 and m16n8k8, ldmatrix, cp.async and conversions. On the host the bodies of
// host_instructions_sm80.h stand in. [warp]: all 32 lanes call together.
// Source: PTX ISA 8.8, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
#pragma once

#include "kernels/ptx/instructions.h"

#if !defined(__CUDACC_RTC__)
#include <host_instructions_sm80.h>
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

// ---- Launches that overlap: on GPUs from kOverlappingLaunches on. Waits until all of the launch
// before has ended, with all that it wrote.
ATTN_PTX void WaitForLaunchBefore() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch's blocks start where this one's have ended.
ATTN_PTX void LaunchNext() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The line of 128 bytes into the L2, before it is loaded.
ATTN_PTX void PrefetchLine(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory");
}

// ---- Conversions, to nearest even, the first in the low half.
ATTN_PTX uint32_t PackHalves(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
ATTN_PTX uint32_t PackBFloat16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Rounds to TF32, eleven bits of a float32, to nearest, ties away from zero; the other bits are
// zero.
ATTN_PTX uint32_t RoundToTf32(float value) {
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0,%1;" : "=r"(word) : "f"(value));
  return word;
}

// ---- Matrix products. [warp] c += a·b: 16 rows × 16 of a, 16 × 8 columns of b.
ATTN_PTX void MmaHalf(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
ATTN_PTX void MmaBFloat16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with 8 columns of a and float32 operands, of which the last 13 bits do not count.
ATTN_PTX void MmaTf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Four 8×8 matrices of 16-bit numbers from shared memory. [warp] Lanes 8n..8n+7 point at the
// rows of matrix n, 16 bytes each. Lane l gets of matrix n in word n: columns 2(l%4) and 2(l%4)+1
// of row l/4; transposed: rows 2(l%4), 2(l%4)+1 of column l/4.
ATTN_PTX uint4 LoadMatrices(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
  return v;
}
ATTN_PTX uint4 LoadMatricesTransposed(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
  return v;
}

// ---- Copies from global to shared memory that the thread does not wait for. 16 bytes, or zeros
// where the source does not exist.
ATTN_PTX void CopyAsync(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}
// The same of 4 bytes.
ATTN_PTX void CopyAsync4(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}
// Closes a group of this thread's copies.
ATTN_PTX void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last `kLeft` groups of this thread are under way.
template <int kLeft>
ATTN_PTX void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
