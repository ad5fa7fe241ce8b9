// The host's bodies of instructions_sm80.h: same names, same arguments, and last the place in the
// source. Products round as tests/emulator/mma_sm80.h says. A copy writes when its thread waits
// for it, as late as it may; its place in shared memory counts as written from the call on, so that
// who still reads the old bytes, or reads before the wait, is a race.
#pragma once

#include <cstdint>
#include <cstring>

#include "tests/emulator/host/host_instructions.h"
#include "tests/emulator/mma_sm80.h"

namespace attnd::ptx {

// Launches do not overlap here.
inline void WaitForLaunchBefore() {}
inline void LaunchNext() {}
inline void PrefetchLine(const void*) {}

namespace host {

struct MatrixRow {
  uint16_t row[8];
  uint32_t words[4];
};
template <bool kTransposed>
void RunLoadMatrices(void* const* lanes, uint32_t) {
  auto at = [&](int matrix, int row, int column) {
    return uint32_t{static_cast<const MatrixRow*>(lanes[8 * matrix + row])->row[column]};
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int outer = lane / 4, inner = lane % 4 * 2;
    for (int n = 0; n < 4; ++n) {
      static_cast<MatrixRow*>(lanes[lane])->words[n] =
          kTransposed ? at(n, inner, outer) | at(n, inner + 1, outer) << 16
                      : at(n, outer, inner) | at(n, outer, inner + 1) << 16;
    }
  }
}
template <bool kTransposed>
uint4 LoadMatrices(const void* p, const SourceLocation& where) {
  MatrixRow lane;
  const uint4 row = Load<uint4>(p, where, true);
  std::memcpy(lane.row, &row, sizeof(row));
  emulator::MeetInWarp(&RunLoadMatrices<kTransposed>, &lane, kAllLanes, where);
  return {lane.words[0], lane.words[1], lane.words[2], lane.words[3]};
}

template <emulator::HalfKind kKind>
void RunMma16816(void* const* lanes, uint32_t) {
  emulator::Multiply16816(kKind, reinterpret_cast<emulator::Mma16816* const*>(lanes));
}
template <emulator::HalfKind kKind>
void Mma16816(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, const SourceLocation& where) {
  emulator::Mma16816 lane{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::MeetInWarp(&RunMma16816<kKind>, &lane, kAllLanes, where);
}

inline void RunMma1688(void* const* lanes, uint32_t) {
  emulator::Multiply1688(reinterpret_cast<emulator::Mma16816* const*>(lanes));
}

}  // namespace host

#define ATTN_WHERE host::SourceLocation where = host::SourceLocation::current()

inline uint32_t PackHalves(float low, float high) { return PackRounded(low, high); }
inline uint32_t PackBFloat16(float low, float high) {
  return BFloat16FromFloat(low) | uint32_t{BFloat16FromFloat(high)} << 16;
}

inline uint32_t RoundToTf32(float value) {
  if (value - value != 0) return BitsOf(value);
  return (BitsOf(value) + 0x1000u) & 0xffffe000u;
}

inline void MmaHalf(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ATTN_WHERE) {
  host::Mma16816<emulator::HalfKind::kFloat16>(c, a, b0, b1, where);
}
inline void MmaBFloat16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        ATTN_WHERE) {
  host::Mma16816<emulator::HalfKind::kBFloat16>(c, a, b0, b1, where);
}

inline void MmaTf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ATTN_WHERE) {
  emulator::Mma16816 lane{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::MeetInWarp(&host::RunMma1688, &lane, host::kAllLanes, where);
}

inline uint4 LoadMatrices(const void* row, ATTN_WHERE) {
  return host::LoadMatrices<false>(row, where);
}
inline uint4 LoadMatricesTransposed(const void* row, ATTN_WHERE) {
  return host::LoadMatrices<true>(row, where);
}

inline void CopyAsync(void* shared, const void* global, bool exists, ATTN_WHERE) {
  emulator::CopyLater(shared, exists ? global : nullptr, 16, where);
}
inline void CopyAsync4(void* shared, const void* global, bool exists, ATTN_WHERE) {
  emulator::CopyLater(shared, exists ? global : nullptr, 4, where);
}
inline void CommitCopies() { emulator::CommitCopies(); }
template <int kLeft>
inline void WaitForCopies(ATTN_WHERE) {
  emulator::WaitForCopies(kLeft, where);
}

#undef ATTN_WHERE

}  // namespace attnd::ptx
