// Arithmetic on single numbers that rounds once, whatever the compiler would contract, and accesses
// of single numbers of 2 and 8 bytes: for kernels/dense. One function an instruction, asm and
// nothing else; on the host the bodies of host_scalar_instructions.h stand in. Source: PTX ISA 8.8.
#pragma once

#include "kernels/ptx/instructions.h"

#if !defined(__CUDACC_RTC__)
#include <host_scalar_instructions.h>
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

// ---- To nearest even; subnormal numbers count.
ATTN_PTX float Add(float a, float b) {
  float y;
  asm("add.rn.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
ATTN_PTX float Subtract(float a, float b) {
  float y;
  asm("sub.rn.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
ATTN_PTX float Multiply(float a, float b) {
  float y;
  asm("mul.rn.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
ATTN_PTX float Divide(float a, float b) {
  float y;
  asm("div.rn.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
ATTN_PTX float SquareRoot(float x) {
  float y;
  asm("sqrt.rn.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_PTX double MultiplyDouble(double a, double b) {
  double y;
  asm("mul.rn.f64 %0,%1,%2;" : "=d"(y) : "d"(a), "d"(b));
  return y;
}
ATTN_PTX double FmaDouble(double a, double b, double c) {
  double y;
  asm("fma.rn.f64 %0,%1,%2,%3;" : "=d"(y) : "d"(a), "d"(b), "d"(c));
  return y;
}
// Rounds to the nearest integer, ties to even.
ATTN_PTX double RoundDouble(double x) {
  double y;
  asm("cvt.rni.f64.f64 %0,%1;" : "=d"(y) : "d"(x));
  return y;
}

// ---- Global memory; the lower half.
ATTN_PTX uint32_t LoadGlobal16(const void* p) {
  uint16_t v;
  asm volatile("ld.global.u16 %0,[%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
ATTN_PTX double LoadGlobalDouble(const void* p) {
  double v;
  asm volatile("ld.global.f64 %0,[%1];" : "=d"(v) : "l"(p) : "memory");
  return v;
}
ATTN_PTX void StoreGlobal16(void* p, uint32_t v) {
  asm volatile("st.global.u16 [%0],%1;" ::"l"(p), "h"(static_cast<uint16_t>(v)) : "memory");
}

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
