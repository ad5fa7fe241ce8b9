// The instructions of sm_70 and later that the kernels use, one function each, asm and nothing
// else; tensor cores are each architecture's own (mma_sm70.h). On the host the bodies of
// host_instructions.h stand in. Every access to shared or global memory in kernel code goes through
// here. Pointers are generic; those into SharedStorage compile to shared
// accesses. Functions marked [warp] must be called by all 32 lanes together, [block] by all threads
// that take part in the barrier. Source: PTX ISA 8.8.
#pragma once

#include "base/hd.h"

#if !defined(__CUDACC_RTC__)
#include <host_instructions.h>
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

// ---- Conversions. Two float16 in a word, the first in the low half.
// Round towards zero: on sm_70 one HADD2 each on the half-precision pipe. Beyond 65504: 65504.
ATTN_PTX uint32_t PackTruncated(float low, float high) {
  uint16_t a, b;
  asm("cvt.rz.f16.f32 %0,%1;" : "=h"(a) : "f"(low));
  asm("cvt.rz.f16.f32 %0,%1;" : "=h"(b) : "f"(high));
  uint32_t word;
  asm("mov.b32 %0,{%1,%2};" : "=r"(word) : "h"(a), "h"(b));
  return word;
}
// Round to nearest even.
ATTN_PTX uint32_t PackRounded(float low, float high) {
  uint16_t a, b;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(b) : "f"(high));
  uint32_t word;
  asm("mov.b32 %0,{%1,%2};" : "=r"(word) : "h"(a), "h"(b));
  return word;
}
ATTN_PTX float LowHalf(uint32_t word) {
  uint16_t a, b;
  asm("mov.b32 {%0,%1},%2;" : "=h"(a), "=h"(b) : "r"(word));
  float value;
  asm("cvt.f32.f16 %0,%1;" : "=f"(value) : "h"(a));
  return value;
}
ATTN_PTX float HighHalf(uint32_t word) {
  uint16_t a, b;
  asm("mov.b32 {%0,%1},%2;" : "=h"(a), "=h"(b) : "r"(word));
  float value;
  asm("cvt.f32.f16 %0,%1;" : "=f"(value) : "h"(b));
  return value;
}
ATTN_PTX uint32_t FloatBits(float value) { return __float_as_uint(value); }
ATTN_PTX float BitsFloat(uint32_t bits) { return __uint_as_float(bits); }

// ---- Arithmetic. Subnormal results of the transcendental ones are flushed to zero.
ATTN_PTX float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_PTX float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_PTX float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
ATTN_PTX float Fma(float a, float b, float c) {
  float y;
  asm("fma.rn.f32 %0,%1,%2,%3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
// base + count·bytes (signed 32-bit factors), one instruction.
ATTN_PTX const char* Offset(const void* base, int count, int bytes) {
  const char* p;
  asm("mad.wide.s32 %0,%1,%2,%3;" : "=l"(p) : "r"(count), "r"(bytes), "l"(base));
  return p;
}
// All 64 bits, in one instruction.
ATTN_PTX uint64_t MultiplyWide(uint32_t a, uint32_t b) {
  uint64_t y;
  asm("mul.wide.u32 %0,%1,%2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}
// Makes `value` opaque here: the compiler keeps it in a register instead of working it out again
// wherever it is used.
ATTN_PTX int Keep(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
ATTN_PTX uint32_t Keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
// Rounds to the nearest integer, ties to even.
ATTN_PTX float Round(float x) {
  float y;
  asm("cvt.rni.f32.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// The same; NaN becomes 0.
ATTN_PTX int32_t RoundToInt(float x) {
  int32_t y;
  asm("cvt.rni.s32.f32 %0,%1;" : "=r"(y) : "f"(x));
  return y;
}
ATTN_PTX float Absolute(float x) {
  float y;
  asm("abs.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// A NaN operand loses against a number.
ATTN_PTX float Max(float a, float b) {
  float y;
  asm("max.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// prmt.b32: byte n of the result is byte (selector >> 4n & 7) of b:a; bit 3 replicates its sign.
ATTN_PTX uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

ATTN_PTX int CountBits(uint32_t x) {
  int y;
  asm("popc.b32 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- Across lanes. [warp]
ATTN_PTX uint32_t ShuffleXor(uint32_t value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
ATTN_PTX float ShuffleXor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
ATTN_PTX bool VoteAny(bool condition) { return __any_sync(0xffffffffu, condition); }
// Bit n: whether the condition holds on lane n.
ATTN_PTX uint32_t Ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
ATTN_PTX void SyncWarp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// ---- Barriers. [block]
ATTN_PTX void SyncThreads() { asm volatile("bar.sync 0;" ::: "memory"); }
// `count` threads meet at barrier `id` (1..15); Arrive does not wait.
ATTN_PTX void BarrierSync(int id, int count) {
  asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(count) : "memory");
}
ATTN_PTX void BarrierArrive(int id, int count) {
  asm volatile("bar.arrive %0,%1;" ::"r"(id), "r"(count) : "memory");
}

// ---- Shared memory. Addresses aligned to the access.
ATTN_PTX uint32_t LoadShared16(const void* p) { return *static_cast<const uint16_t*>(p); }
ATTN_PTX uint32_t LoadShared32(const void* p) { return *static_cast<const uint32_t*>(p); }
ATTN_PTX float LoadSharedFloat(const void* p) { return *static_cast<const float*>(p); }
ATTN_PTX uint2 LoadShared64(const void* p) { return *static_cast<const uint2*>(p); }
ATTN_PTX float2 LoadSharedFloat2(const void* p) { return *static_cast<const float2*>(p); }
ATTN_PTX uint4 LoadShared128(const void* p) { return *static_cast<const uint4*>(p); }
// The lower half.
ATTN_PTX void StoreShared16(void* p, uint32_t v) {
  *static_cast<uint16_t*>(p) = static_cast<uint16_t>(v);
}
ATTN_PTX void StoreShared32(void* p, uint32_t v) { *static_cast<uint32_t*>(p) = v; }
ATTN_PTX void StoreSharedFloat(void* p, float v) { *static_cast<float*>(p) = v; }
ATTN_PTX void StoreShared64(void* p, uint2 v) { *static_cast<uint2*>(p) = v; }
ATTN_PTX void StoreShared128(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
ATTN_PTX double LoadSharedDouble(const void* p) { return *static_cast<const double*>(p); }
ATTN_PTX void StoreSharedDouble(void* p, double v) { *static_cast<double*>(p) = v; }

// ---- Global memory. "Constant" ones go through the read-only path: nothing in this launch writes
// what they read. They are volatile, so that a prefetch stays where it is written.
ATTN_PTX uint4 LoadConstant128(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// The same if `condition`; otherwise `v` stays as it is. One predicated instruction, no branch.
ATTN_PTX void LoadConstant128If(uint4& v, const void* p, bool condition) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%5,0; @q ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<int>(condition)));
}
ATTN_PTX float LoadConstantFloat(const void* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(v) : "l"(p));
  return v;
}
// The same if `condition`; otherwise `v` stays as it is.
ATTN_PTX void LoadConstantFloatIf(float& v, const void* p, bool condition) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%2,0; @q ld.global.nc.f32 %0,[%1];}"
               : "+f"(v)
               : "l"(p), "r"(static_cast<int>(condition)));
}
ATTN_PTX uint32_t LoadConstant32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
// The same if `condition`; otherwise `v` stays as it is.
ATTN_PTX void LoadConstant32If(uint32_t& v, const void* p, bool condition) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%2,0; @q ld.global.nc.u32 %0,[%1];}"
               : "+r"(v)
               : "l"(p), "r"(static_cast<int>(condition)));
}
ATTN_PTX uint32_t LoadConstant16(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(v) : "l"(p));
  return v;
}
ATTN_PTX uint32_t LoadConstant8(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
ATTN_PTX float LoadGlobalFloat(const void* p) {
  float v;
  asm volatile("ld.global.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
ATTN_PTX uint32_t LoadGlobal32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
ATTN_PTX uint2 LoadGlobal64(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
ATTN_PTX uint4 LoadGlobal128(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
ATTN_PTX void StoreGlobal32(void* p, uint32_t v) {
  asm volatile("st.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
ATTN_PTX void StoreGlobalFloat(void* p, float v) {
  asm volatile("st.global.f32 [%0],%1;" ::"l"(p), "f"(v) : "memory");
}
ATTN_PTX void StoreGlobalDouble(void* p, double v) {
  asm volatile("st.global.f64 [%0],%1;" ::"l"(p), "d"(v) : "memory");
}
ATTN_PTX void StoreGlobal64(void* p, uint2 v) {
  asm volatile("st.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
ATTN_PTX void StoreGlobal128(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
ATTN_PTX void ReduceAdd(float* p, float v) {
  asm volatile("red.global.add.f32 [%0],%1;" ::"l"(p), "f"(v) : "memory");
}
ATTN_PTX void ReduceAdd(int32_t* p, int32_t v) {
  asm volatile("red.global.add.s32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
ATTN_PTX void ReduceOr(uint32_t* p, uint32_t v) {
  asm volatile("red.global.or.b32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
// The same if `condition`, without a branch.
ATTN_PTX void ReduceOrIf(uint32_t* p, uint32_t v, bool condition) {
  asm volatile("{.reg .pred q; setp.ne.b32 q,%2,0; @q red.global.or.b32 [%0],%1;}" ::"l"(p), "r"(v),
               "r"(static_cast<int>(condition))
               : "memory");
}
ATTN_PTX void ReduceMax(uint32_t* p, uint32_t v) {
  asm volatile("red.global.max.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
ATTN_PTX int32_t LoadAcquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.gpu.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Returns the number before the addition, which comes after all earlier writes of this thread and
// before all its later reads.
ATTN_PTX int32_t AddAcquireRelease(int32_t* p, int32_t v) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],%2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
ATTN_PTX void StoreRelease(int32_t* p, int32_t v) {
  asm volatile("st.release.gpu.global.s32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
