// wgmma on the host: a warp's share of one product of its warpgroup, 16 rows of 64. Operands in
// shared memory stand where their descriptors say, in rows of 128 bytes with a 128-byte swizzle.
// Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Shared Memory Layout". Rounds as
// mma_sm80.h says. Shared memory is checked as of the running thread.
#pragma once

#include <cstdint>
#include <source_location>

#include "tests/emulator/mma_sm80.h"

namespace attnd::emulator {

struct WarpProduct {
  HalfKind kind = HalfKind::kFloat16;
  int groups = 0;     // of eight columns
  float* c[32] = {};  // of each lane, [groups][4]; also the addend
  bool adds = true;   // else the addend is zero
  bool in_registers = false;
  // Whether a matrix's rows are c's depth.
  bool across_a = false, across_b = false;
  uint32_t a[32][4] = {};  // of each lane as in m16n8k16, or
  uint64_t matrix_a = 0;   // rows of 16 numbers
  int first_row = 0;       // of the warp in matrix_a
  uint64_t matrix_b = 0;   // rows of it are columns of c, or (in_registers) of c's depth
  std::source_location where;
};
void Multiply(const WarpProduct& product);

// A descriptor from an offset in shared memory and two distances, all multiples of 16 bytes.
constexpr uint64_t MatrixDescriptor(uint32_t offset, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((offset & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
         uint64_t{1} << 62;
}
// Bits 4 to 6 of an offset are those of the row that bits 7 to 9 number, twisted.
constexpr uint32_t Swizzled(uint32_t offset) { return offset ^ (offset >> 3 & 0x70); }

}  // namespace attnd::emulator
