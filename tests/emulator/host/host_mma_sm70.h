// The host's bodies of mma_sm70.h: same names, same arguments, and last the place in the source.
// They round as tests/emulator/mma_sm70.h says.
#pragma once

#include <cstdint>

#include "tests/emulator/mma_sm70.h"
#include "tests/emulator/host/host_instructions.h"

namespace attnd::ptx {

namespace host {

using emulator::Major;

template <Major kA, Major kB>
void RunMma32(void* const* lanes, uint32_t) {
  emulator::MultiplyF32(kA, kB, reinterpret_cast<emulator::Mma32* const*>(lanes));
}
template <Major kA, Major kB>
void RunMma16(void* const* lanes, uint32_t) {
  emulator::MultiplyF16(kA, kB, reinterpret_cast<emulator::Mma16* const*>(lanes));
}
template <Major kA, Major kB>
inline void Mma(float* c, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                const SourceLocation& where) {
  emulator::Mma32 lane{c, {a0, a1}, {b0, b1}};
  emulator::MeetInWarp(&RunMma32<kA, kB>, &lane, kAllLanes, where);
}

}  // namespace host

#define ATTN_WHERE host::SourceLocation where = host::SourceLocation::current()

inline void MmaRowCol(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                      ATTN_WHERE) {
  host::Mma<host::Major::kRow, host::Major::kColumn>(c, a0, a1, b0, b1, where);
}
inline void MmaRowRow(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                      ATTN_WHERE) {
  host::Mma<host::Major::kRow, host::Major::kRow>(c, a0, a1, b0, b1, where);
}
inline void MmaColRow(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                      ATTN_WHERE) {
  host::Mma<host::Major::kColumn, host::Major::kRow>(c, a0, a1, b0, b1, where);
}
inline void MmaRowColHalf(uint32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                          ATTN_WHERE) {
  emulator::Mma16 lane{c, {a0, a1}, {b0, b1}};
  emulator::MeetInWarp(&host::RunMma16<host::Major::kRow, host::Major::kColumn>, &lane,
                       host::kAllLanes, where);
}

#undef ATTN_WHERE

}  // namespace attnd::ptx
