// mma.sync.m16n8k16 and m16n8k8 (TF32) on the host: one warp's product D = A·B + C. Source: PTX
// ISA, "Matrix Fragments for mma.m16n8k16", "… mma.m16n8k8".
//
// Rounding. Products are exact, all of them and the addend are summed exactly, and the sum
// is rounded once, toward zero. GPUs truncate the addends to a common last place before they add
// (Fasi et al., 2021), so they may lose a few units in the last place more. Tests against the
// emulator therefore never ask for equal bits of sums that are not exact.
#pragma once

#include <cstdint>

namespace attnd::emulator {

enum class HalfKind : uint8_t { kFloat16, kBFloat16 };

float Widen(HalfKind kind, uint32_t half);

// One lane brings these; d is also the addend.
struct Mma16816 {
  float* d;  // [4]
  uint32_t a[4], b[2];
};
void Multiply16816(HalfKind kind, Mma16816* const lanes[32]);
// Words of a and b are TF32: float32 without their last 13 bits.
void Multiply1688(Mma16816* const lanes[32]);

}  // namespace attnd::emulator
