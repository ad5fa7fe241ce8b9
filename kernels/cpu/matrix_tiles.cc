#include "kernels/cpu/matrix_tiles.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/tile_loop.h"
#endif

namespace attnd {
namespace {

#if defined(__x86_64__)

// Intel's instructions; written out, so that no flag of the compiler is needed.
struct AmxTiles {
  template <int kTile>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void Load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(row_bytes)
                 : "memory");
  }
  template <int kTile>
  static void Store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(row_bytes) : "memory");
  }
  template <int kC, int kA, int kB>
  static void Multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

// All eight registers 16 rows of 64 bytes.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

void Configure() {
  static constexpr TileConfiguration kAllWhole;
  asm volatile("ldtilecfg %0" ::"m"(kAllWhole));
}

void Release() { asm volatile("tilerelease"); }

constexpr TileUnit kAmx = {.name = "AMX",
                           .configure = &Configure,
                           .multiply = &MultiplyTiles<AmxTiles>,
                           .release = &Release};

// Whether processor and kernel have AVX-512, tiles and bfloat16 products (Intel SDM, CPUID leaf 7
// and XCR0), and the kernel lets this process use them (Linux, Documentation/x86/xstate.rst).
bool HasAmx() {
  uint32_t eax, ebx, ecx, edx;
  if (__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx) == 0 || (ecx >> 27 & 1) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr uint32_t kBfloat16 = 1u << 22, kTiles = 1u << 24, kAvx512 = 1u << 16;
  if ((edx & kBfloat16) == 0 || (edx & kTiles) == 0 || (ebx & kAvx512) == 0) return false;
  uint32_t enabled, high;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  constexpr uint32_t kTileState = 3u << 17, kVectorState = 0xe6;
  if ((enabled & kTileState) != kTileState || (enabled & kVectorState) != kVectorState)
    return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const TileUnit* Find() { return HasAmx() ? &kAmx : nullptr; }

#else

const TileUnit* Find() { return nullptr; }

#endif

std::atomic<const TileUnit*>& Chosen() {
  static std::atomic<const TileUnit*> chosen = Find();
  return chosen;
}

}  // namespace

const TileUnit* MatrixTiles() { return Chosen().load(std::memory_order_relaxed); }

void ChooseMatrixTiles(const TileUnit* unit) { Chosen().store(unit, std::memory_order_relaxed); }

}  // namespace attnd
