// The instructions that sm_90a adds and the kernels use, one function each, as in instructions.h:
// wgmma, mbarrier, register shares of warpgroups. [group]: all 128 threads of a warpgroup call
// together. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier".
#pragma once

#include "kernels/ptx/instructions_sm80.h"

#if !defined(__CUDACC_RTC__)
#include "kernels/ptx/host_instructions_sm90.h"
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

ATTN_PTX uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers in shared memory, of 8 bytes: phases that end when `arrivals` have arrived.
ATTN_PTX void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to all; a block barrier has to follow.
ATTN_PTX void FenceBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
ATTN_PTX void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives once this thread's copies so far have come.
ATTN_PTX void ArriveAfterCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}
// Until the phase of this parity has ended.
ATTN_PTX void WaitFor(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; L%=: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra E%=; bra "
      "L%=; E%=:}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
// Makes what was written to shared memory visible to wgmma.
ATTN_PTX void FenceShared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Registers of each thread, by whole warpgroups.
template <int kRegisters>
ATTN_PTX void KeepRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ATTN_PTX void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Matrix products. [group] Operands in shared memory stand in rows of 128 bytes, eight rows a
// swizzle: their descriptors, from the address and two distances in bytes.
ATTN_PTX uint64_t MatrixOf(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
         1ull << 62;
}
ATTN_PTX void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTN_PTX void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define ATTN_F4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_F32(c) ATTN_F4(c, 0), ATTN_F4(c, 1), ATTN_F4(c, 2), ATTN_F4(c, 3), ATTN_F4(c, 4), ATTN_F4(c, 5), ATTN_F4(c, 6), ATTN_F4(c, 7)
#define ATTN_F64(c) ATTN_F32(c), ATTN_F4(c, 8), ATTN_F4(c, 9), ATTN_F4(c, 10), ATTN_F4(c, 11), ATTN_F4(c, 12), ATTN_F4(c, 13), ATTN_F4(c, 14), ATTN_F4(c, 15)
#define ATTN_F128(c) ATTN_F64(c), ATTN_F4(c, 16), ATTN_F4(c, 17), ATTN_F4(c, 18), ATTN_F4(c, 19), ATTN_F4(c, 20), ATTN_F4(c, 21), ATTN_F4(c, 22), ATTN_F4(c, 23), ATTN_F4(c, 24), ATTN_F4(c, 25), ATTN_F4(c, 26), ATTN_F4(c, 27), ATTN_F4(c, 28), ATTN_F4(c, 29), ATTN_F4(c, 30), ATTN_F4(c, 31)

#define ATTN_WGMMA_64(type)                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p,%34,0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},%32,%33,p,1,1,0,0;}" \
               : ATTN_F32(c) : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define ATTN_WGMMA_R64(type)                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,1,1,1,1;" \
               : ATTN_F32(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaHalf(float (&c)[8][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_64("f16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaHalf(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R64("f16"); }

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[8][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_64("bf16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R64("bf16"); }

template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : ATTN_F32(c) : "n"(kLeft) : "memory");
}
ATTN_PTX void Pin(float (&c)[8][4]) { asm volatile("" : ATTN_F32(c)::"memory"); }

#define ATTN_WGMMA_128(type)                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p,%66,0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},%64,%65,p,1,1,0,0;}" \
               : ATTN_F64(c) : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define ATTN_WGMMA_R128(type)                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},{%64,%65,%66,%67},%68,1,1,1,1;" \
               : ATTN_F64(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaHalf(float (&c)[16][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_128("f16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaHalf(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R128("f16"); }

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[16][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_128("bf16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R128("bf16"); }

template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : ATTN_F64(c) : "n"(kLeft) : "memory");
}
ATTN_PTX void Pin(float (&c)[16][4]) { asm volatile("" : ATTN_F64(c)::"memory"); }

#define ATTN_WGMMA_256(type)                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p,%130,0; wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},%128,%129,p,1,1,0,0;}" \
               : ATTN_F128(c) : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define ATTN_WGMMA_R256(type)                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},{%128,%129,%130,%131},%132,1,1,1,1;" \
               : ATTN_F128(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaHalf(float (&c)[32][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_256("f16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaHalf(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R256("f16"); }

// c (+)= a·bᵀ, both in shared memory by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[32][4], uint64_t a, uint64_t b, bool adds) { ATTN_WGMMA_256("bf16"); }
// c += a·b, a in registers, b by rows.
ATTN_PTX void WgmmaBFloat16(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b) { ATTN_WGMMA_R256("bf16"); }

template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[32][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %128;" : ATTN_F128(c) : "n"(kLeft) : "memory");
}
ATTN_PTX void Pin(float (&c)[32][4]) { asm volatile("" : ATTN_F128(c)::"memory"); }

ATTN_PTX void Pin(uint32_t& word) { asm volatile("" : "+r"(word)); }
ATTN_PTX void Trap() { asm volatile("trap;"); }
}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
