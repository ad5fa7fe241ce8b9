// mma.sync.m8n8k4 on the host: one warp's product D = A·B + C as four independent 8×8×4 products,
// one per quad-pair (lanes 4q..4q+3 and 16+4q..16+4q+3). Source: PTX ISA, "Matrix Fragments for
// mma.m8n8k4".
//
// Rounding. Products of two f16 are exact; the four of them and the addend are summed exactly, and
// the sum is rounded once: toward zero for f32 accumulators, to nearest even for f16 ones. Volta
// itself truncates the addends to the largest one's last place before it adds (Fasi et al., 2021,
// "Numerical behavior of NVIDIA tensor cores"), so it may lose up to a few units in the last place
// more than this; newer chips, which emulate the instruction, round after every addition. Tests
// against the emulator therefore never ask for equal bits of sums that are not exact.
#pragma once

#include <cstdint>

namespace attnd::emulator {

enum class Major : uint8_t { kRow, kColumn };

// Where a lane's numbers lie within its quad-pair's matrices. `e` counts a lane's elements in
// register order (two f16 a register, low half first).
struct FragmentPlace {
  int row, column;
};
constexpr int QuadPair(int lane) { return lane % 16 / 4; }
constexpr FragmentPlace PlaceInA(Major major, int lane, int e) {  // 8×4, e < 4
  int half = lane / 16, in_quad = lane % 4;
  return major == Major::kRow ? FragmentPlace{in_quad + 4 * half, e}
                              : FragmentPlace{e + 4 * half, in_quad};
}
constexpr FragmentPlace PlaceInB(Major major, int lane, int e) {  // 4×8, e < 4
  int half = lane / 16, in_quad = lane % 4;
  return major == Major::kRow ? FragmentPlace{in_quad, e + 4 * half}
                              : FragmentPlace{e, in_quad + 4 * half};
}
constexpr FragmentPlace PlaceInC16(int lane, int e) {  // 8×8, e < 8
  return {lane % 4 + 4 * (lane / 16), e};
}
constexpr FragmentPlace PlaceInC32(int lane, int e) {  // 8×8, e < 8
  return {(lane & 1) + (e & 2) + 4 * (lane / 16), (e & 1) + (lane & 2) + (e & 4)};
}

// One lane brings these; d is also the addend.
struct Mma32 {
  float* d;  // [8]
  uint32_t a[2], b[2];
};
struct Mma16 {
  uint32_t* d;  // [4], two f16 each
  uint32_t a[2], b[2];
};
void MultiplyF32(Major a, Major b, Mma32* const lanes[32]);
void MultiplyF16(Major a, Major b, Mma16* const lanes[32]);

// value rounded toward zero; to nearest even f16 bits.
float TruncateToFloat(double value);
uint16_t RoundToHalf(double value);

}  // namespace attnd::emulator
