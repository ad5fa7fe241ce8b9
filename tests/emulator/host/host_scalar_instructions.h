// The host's bodies of scalar_instructions.h: see host_instructions.h.
#pragma once

#include <cmath>

#include "tests/emulator/host/host_instructions.h"

namespace attnd::ptx {

inline float Add(float a, float b) { return a + b; }
inline float Subtract(float a, float b) { return a - b; }
inline float Multiply(float a, float b) { return a * b; }
inline float Divide(float a, float b) { return a / b; }
inline float SquareRoot(float x) { return std::sqrt(x); }
inline double MultiplyDouble(double a, double b) { return a * b; }
inline double FmaDouble(double a, double b, double c) { return std::fma(a, b, c); }
inline double RoundDouble(double x) { return std::nearbyint(x); }

inline uint32_t LoadGlobal16(const void* p,
                             host::SourceLocation where = host::SourceLocation::current()) {
  return host::Load<uint16_t>(p, where, false);
}
inline double LoadGlobalDouble(const void* p,
                               host::SourceLocation where = host::SourceLocation::current()) {
  return host::Load<double>(p, where, false);
}
inline void StoreGlobal16(void* p, uint32_t v,
                          host::SourceLocation where = host::SourceLocation::current()) {
  host::Store(p, static_cast<uint16_t>(v), where, false);
}

}  // namespace attnd::ptx
