// The instructions that sm_90a adds and the kernels use, one function each, as in instructions.h:
// tensor maps (TMA), barriers in shared memory, products of warpgroups, register shares. [group]:
// all 128 threads of a warpgroup call together. Source: PTX ISA 8.8, "Parallel Synchronization and
// Communication Instructions: mbarrier", "Data Movement: cp.async.bulk.tensor", "Asynchronous
// Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/ptx/instructions_sm80.h"
#include "kernels/ptx/tensor_map.h"

#if !defined(__CUDACC_RTC__)
#include <host_instructions_sm90.h>
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
// Arrives, and lets the phase wait for so many bytes of LoadBox and LoadInBulk.
ATTN_PTX void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity has ended.
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
// Copies so many bytes, a multiple of 16, from and to places aligned likewise.
ATTN_PTX void LoadInBulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
          SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
// The box into the L2, before it is loaded.
ATTN_PTX void PrefetchBox(const TensorMap* map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0,{%1,%2,%3,%4}];" ::"l"(map),
               "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// ---- Sums in global memory of numbers that stand in shared memory one after another, in bulk:
// multiples of 16 bytes, by one thread, known to the copies' order (FenceShared).
ATTN_PTX void AddInBulk(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0],[%1],%2;" ::"l"(to),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
}
ATTN_PTX void AddInBulk(int32_t* to, const int32_t* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0],[%1],%2;" ::"l"(to),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
}
ATTN_PTX void CommitBulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kLeft groups have read shared memory.
template <int kLeft>
ATTN_PTX void WaitForBulkReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// Copies so many bytes of shared memory to global memory, in groups like sums.
ATTN_PTX void StoreInBulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
}
// Waits until all groups have reached global memory.
ATTN_PTX void WaitForBulk() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders what bulk copies write and what loads and stores do.
ATTN_PTX void FenceBulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Four 8×8 matrices of 16-bit numbers, held as operands of m16n8k16 are; a lane has the address of
// a row. [warp]
ATTN_PTX void StoreMatrices(void* row, uint4 words) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(SharedAddress(row)),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}
// Waits for at least so many cycles.
ATTN_PTX void Pause(uint32_t cycles) {
  uint32_t begin, now;
  asm volatile("mov.u32 %0,%%clock;" : "=r"(begin)::"memory");
  do {
    asm volatile("mov.u32 %0,%%clock;" : "=r"(now)::"memory");
  } while (now - begin < cycles);
}

ATTN_PTX uint32_t AddGlobal(uint32_t* p, uint32_t value) {
  uint32_t old;
  asm volatile("atom.global.add.u32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

// Adds after all memory operations that the thread knows of.
ATTN_PTX void AddRelease(uint32_t* p, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0],%1;" ::"l"(p), "r"(value) : "memory");
}

// Waits until a number that others raise (AddRelease) is at least `count`.
ATTN_PTX void WaitForCount(const uint32_t* p, int count) {
  asm volatile(
      "{.reg .pred q; .reg .u32 n; L%=: ld.acquire.gpu.global.u32 n,[%0]; setp.lo.u32 q,n,%1; @q "
      "bra "
      "L%=;}" ::"l"(p),
      "r"(count)
      : "memory");
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
// Returns the place so many bytes on. One addition does, since addresses in shared memory do not
// carry.
ATTN_PTX uint64_t MovedMatrix(uint64_t matrix, uint32_t bytes) {
  uint64_t moved;
  asm("{.reg .b32 low, high; mov.b64 {low,high},%1; add.u32 low,low,%2; mov.b64 %0,{low,high};}"
      : "=l"(moved)
      : "l"(matrix), "r"(bytes >> 4));
  return moved;
}
ATTN_PTX void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTN_PTX void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define ATTN_C4(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_C16(c, n) ATTN_C4(c, n), ATTN_C4(c, n + 1), ATTN_C4(c, n + 2), ATTN_C4(c, n + 3)
#define ATTN_C32(c) ATTN_C16(c, 0), ATTN_C16(c, 4)
#define ATTN_C64(c) ATTN_C32(c), ATTN_C16(c, 8), ATTN_C16(c, 12)
#define ATTN_C96(c) ATTN_C64(c), ATTN_C16(c, 16), ATTN_C16(c, 20)
// Operands that a product writes without reading them.
#define ATTN_N4(c, n) "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3])
#define ATTN_N16(c) ATTN_N4(c, 0), ATTN_N4(c, 1), ATTN_N4(c, 2), ATTN_N4(c, 3)
#define ATTN_N32(c) ATTN_N16(c), ATTN_N4(c, 4), ATTN_N4(c, 5), ATTN_N4(c, 6), ATTN_N4(c, 7)
#define ATTN_CC16(c) ATTN_C16(c, 0)
#define ATTN_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define ATTN_D32                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ATTN_D64                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define ATTN_D96                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
  "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "  \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "  \
  "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "  \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, "  \
  "%67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "  \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, "  \
  "%93, %94, %95}"

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

// Both in shared memory, without the predicate.
//   …First         c = a·bᵀ
//   …Next          c += a·bᵀ
//   …Across        c += aᵀ·b, by rows both: their rows are the depth
//   …AcrossFirst   c = aᵀ·b
//   …AcrossB       c += a·b: b's rows are the depth
// With "+f" and a predicate the compiler would keep the old values for the first product of a sum,
// and wait for products in flight where registers are short.
#define ATTN_STORED_PRODUCT(Name, type, groups, columns, C, D, A0, A1, adds, across, across_b) \
  ATTN_PTX void Name(float(&c)[groups][4], uint64_t a, uint64_t b) {                           \
    asm volatile("{.reg .pred p; setp.ne.b32 p,0," adds                                        \
                 "; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " D  \
                 "," A0 "," A1 ",p,1,1," across "," across_b ";}"                              \
                 : C(c)                                                                        \
                 : "l"(a), "l"(b));                                                            \
  }
#define ATTN_STORED_PRODUCTS(Name, type)                                                           \
  ATTN_STORED_PRODUCT(Name##First, type, 8, "64", ATTN_N32, ATTN_D32, "%32", "%33", "0", "0", "0") \
  ATTN_STORED_PRODUCT(Name##Next, type, 8, "64", ATTN_C32, ATTN_D32, "%32", "%33", "1", "0", "0")  \
  ATTN_STORED_PRODUCT(Name##AcrossFirst, type, 8, "64", ATTN_N32, ATTN_D32, "%32", "%33", "0",     \
                      "1", "1")                                                                    \
  ATTN_STORED_PRODUCT(Name##Across, type, 8, "64", ATTN_C32, ATTN_D32, "%32", "%33", "1", "1",     \
                      "1")                                                                         \
  ATTN_STORED_PRODUCT(Name##AcrossFirst, type, 4, "32", ATTN_N16, ATTN_D16, "%16", "%17", "0",     \
                      "1", "1")                                                                    \
  ATTN_STORED_PRODUCT(Name##Across, type, 4, "32", ATTN_CC16, ATTN_D16, "%16", "%17", "1", "1",    \
                      "1")                                                                         \
  ATTN_STORED_PRODUCT(Name##Next, type, 16, "128", ATTN_C64, ATTN_D64, "%64", "%65", "1", "0",     \
                      "0")                                                                         \
  ATTN_STORED_PRODUCT(Name##AcrossB, type, 16, "128", ATTN_C64, ATTN_D64, "%64", "%65", "1", "0",  \
                      "1")                                                                         \
  ATTN_STORED_PRODUCT(Name##Across, type, 16, "128", ATTN_C64, ATTN_D64, "%64", "%65", "1", "1",   \
                      "1")                                                                         \
  ATTN_STORED_PRODUCT(Name##Across, type, 24, "192", ATTN_C96, ATTN_D96, "%96", "%97", "1", "1",   \
                      "1")
ATTN_STORED_PRODUCTS(WarpgroupHalf, "f16")
ATTN_STORED_PRODUCTS(WarpgroupBFloat16, "bf16")

// Waits until all but the last kLeft committed groups are done; c belongs to those that are.
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[4][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;" : ATTN_CC16(c) : "n"(kLeft) : "memory");
}
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : ATTN_C32(c) : "n"(kLeft) : "memory");
}
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : ATTN_C64(c) : "n"(kLeft) : "memory");
}
template <int kLeft>
ATTN_PTX void WaitForProducts(float (&c)[24][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %96;" : ATTN_C96(c) : "n"(kLeft) : "memory");
}
// The same where nothing is read yet of those that are done.
template <int kLeft>
ATTN_PTX void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Registers that products read or write stay in place, and what was computed before comes before.
ATTN_PTX void Pin(float (&c)[4][4]) { asm volatile("" : ATTN_CC16(c)::"memory"); }
ATTN_PTX void Pin(float (&c)[8][4]) { asm volatile("" : ATTN_C32(c)::"memory"); }
ATTN_PTX void Pin(float (&c)[16][4]) { asm volatile("" : ATTN_C64(c)::"memory"); }
ATTN_PTX void Pin(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace attnd::ptx

#undef ATTN_PTX
#endif  // __CUDACC_RTC__
