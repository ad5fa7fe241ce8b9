#include "tests/cpu_tiles/emulated_tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "base/check.h"
#include "kernels/cpu/tile_loop.h"
#endif

namespace attnd {

#if defined(__x86_64__)
namespace {

struct TileRegisters {
  alignas(64) uint8_t bytes[8][kTileSide][64];
  bool configured = false;
};
thread_local TileRegisters registers;

struct SlowTiles {
  template <int kTile>
  static void Zero() {
    CHECK(registers.configured);
    std::memset(registers.bytes[kTile], 0, sizeof(registers.bytes[kTile]));
  }
  template <int kTile>
  static void Load(const void* from, int64_t row_bytes) {
    for (int r = 0; r < kTileSide; ++r) {
      std::memcpy(registers.bytes[kTile][r], static_cast<const uint8_t*>(from) + r * row_bytes, 64);
    }
  }
  template <int kTile>
  static void Store(void* to, int64_t row_bytes) {
    for (int r = 0; r < kTileSide; ++r) {
      std::memcpy(static_cast<uint8_t*>(to) + r * row_bytes, registers.bytes[kTile][r], 64);
    }
  }
  template <int kC, int kA, int kB>
  [[gnu::target("avx512f")]] static void Multiply() {
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // round to nearest, denormals are zero and flush to it, no exceptions
    for (int m = 0; m < kTileSide; ++m) {
      Floats even = {}, odd = {};
      for (int k = 0; k < kTileSide; ++k) {
        uint32_t pair;
        std::memcpy(&pair, &registers.bytes[kA][m][4 * k], 4);
        const Words b = *reinterpret_cast<const Words*>(registers.bytes[kB][k]);
        // The product of two bfloat16 numbers is exact, so that this is the fused sum.
        even += AsFloats(Words{} + (pair << 16)) * AsFloats(b << 16);
        odd += AsFloats(Words{} + (pair & 0xffff0000u)) * AsFloats(b & 0xffff0000u);
      }
      *reinterpret_cast<Floats*>(registers.bytes[kC][m]) += even + odd;
    }
    _mm_setcsr(mode);
  }

 private:
  using Floats [[gnu::vector_size(64), gnu::may_alias]] = float;
  using Words [[gnu::vector_size(64), gnu::may_alias]] = uint32_t;
  [[gnu::target("avx512f")]] static Floats AsFloats(Words bits) {
    return reinterpret_cast<Floats>(bits);
  }
};

void Configure() { registers.configured = true; }
void Release() { registers.configured = false; }

constexpr TileUnit kEmulated = {.name = "EMULATED",
                                .configure = &Configure,
                                .multiply = &MultiplyTiles<SlowTiles>,
                                .release = &Release};

}  // namespace

const TileUnit* EmulatedTiles() { return __builtin_cpu_supports("avx512f") ? &kEmulated : nullptr; }

#else

const TileUnit* EmulatedTiles() { return nullptr; }

#endif

}  // namespace attnd
