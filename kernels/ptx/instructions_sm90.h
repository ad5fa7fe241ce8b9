// The instructions that sm_90a adds and the kernels use, one function each, as in instructions.h:
// tensor maps (TMA), barriers in shared memory, products of warpgroups, register shares. [group]:
// all 128 threads of a warpgroup call together. Source: PTX ISA 8.8, "Parallel Synchronization and
// Communication Instructions: mbarrier", "Data Movement: cp.async.bulk.tensor", "Asynchronous
// Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/ptx/instructions_sm80.h"
#include "kernels/ptx/tensor_map.h"

#if !defined(__CUDACC_RTC__)
#include "kernels/ptx/host_instructions_sm90.h"
#else

#define ATTN_PTX static __device__ __forceinline__

namespace attnd::ptx {

ATTN_PTX uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers of 8 bytes: phases that end when `arrivals` have come, and all bytes expected.
ATTN_PTX void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers known to all; a block barrier has to follow.
ATTN_PTX void FenceBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
ATTN_PTX void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives, and lets the phase wait for so many bytes of LoadBox.
ATTN_PTX void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}
// Until the phase of this parity has ended.
ATTN_PTX void WaitForPhase(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; L%=: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra E%=; bra "
      "L%=; E%=:}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
// Makes this thread's writes to shared memory known to products.
ATTN_PTX void FenceShared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Tiles by tensor maps.
// Before the first use of a map that the host wrote since the last launch.
ATTN_PTX void FenceMap(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0],128;" ::"l"(map) : "memory");
}
// The map's box at this place, into shared memory; `barrier` hears of its bytes.
ATTN_PTX void LoadBox(void* to, const TensorMap* map, int column, int row, int head, int batch,
                      uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0],[%1,{%3,%4,%5,%6}],[%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
ATTN_PTX uint32_t AddGlobal(uint32_t* p, uint32_t value) {
  uint32_t old;
  asm volatile("atom.global.add.u32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

// The first lane's value; says that all lanes have the same. [warp]
ATTN_PTX int Uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

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
ATTN_PTX uint64_t MatrixOf(const void* address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((SharedAddress(address) & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
         1ull << 62;
}
ATTN_PTX void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTN_PTX void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define ATTN_C4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_C16(c, n) ATTN_C4(c, n), ATTN_C4(c, n + 1), ATTN_C4(c, n + 2), ATTN_C4(c, n + 3)
#define ATTN_C32(c) ATTN_C16(c, 0), ATTN_C16(c, 4)
#define ATTN_C64(c) ATTN_C32(c), ATTN_C16(c, 8), ATTN_C16(c, 12)
#define ATTN_D32                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ATTN_D64                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// The accumulator of 64 rows × 8·kGroups columns is [kGroups][4] a lane, a warp's rows sixteen
// after another.
//   c = a·bᵀ, or c += …, both in shared memory by rows
//   c += a·b, a in registers as of m16n8k16, b in shared memory by rows
#define ATTN_PRODUCTS(Name, type, groups, columns, C, D, A0, A1, A2, A3, A4)                    \
  ATTN_PTX void Name(float(&c)[groups][4], uint64_t a, uint64_t b, bool adds) {                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p," A2                                             \
                 ",0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " D \
                 "," A0 "," A1 ",p,1,1,0,0;}"                                                   \
                 : C(c)                                                                         \
                 : "l"(a), "l"(b), "r"(static_cast<int>(adds)));                                \
  }                                                                                             \
  ATTN_PTX void Name(float(&c)[groups][4], const uint32_t(&a)[4], uint64_t b) {                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " D     \
                 ",{" A0 "," A1 "," A2 "," A3 "}," A4 ",1,1,1,1;"                               \
                 : C(c)                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }
ATTN_PRODUCTS(WarpgroupHalf, "f16", 8, "64", ATTN_C32, ATTN_D32, "%32", "%33", "%34", "%35", "%36")
ATTN_PRODUCTS(WarpgroupHalf, "f16", 16, "128", ATTN_C64, ATTN_D64, "%64", "%65", "%66", "%67",
              "%68")
ATTN_PRODUCTS(WarpgroupBFloat16, "bf16", 8, "64", ATTN_C32, ATTN_D32, "%32", "%33", "%34", "%35",
              "%36")
ATTN_PRODUCTS(WarpgroupBFloat16, "bf16", 16, "128", ATTN_C64, ATTN_D64, "%64", "%65", "%66", "%67",
              "%68")

// Until all but the last kLeft committed groups are done; c belongs to those that are.
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : ATTN_C32(c) : "n"(kLeft) : "memory");
}
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : ATTN_C64(c) : "n"(kLeft) : "memory");
}
// Registers that products read or write stay in place, and what was computed before comes before.
ATTN_PTX void Pin(float (&c)[8][4]) { asm volatile("" : ATTN_C32(c)::"memory"); }
ATTN_PTX void Pin(float (&c)[16][4]) { asm volatile("" : ATTN_C64(c)::"memory"); }
ATTN_PTX void Pin(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
