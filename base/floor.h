// Division that rounds towards minus infinity, as positions relative to a diagonal need it: C++
// rounds towards zero. `b` is positive. Any thread.
#pragma once

#include <cstdint>

namespace attnd {

constexpr int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient * b > a ? quotient - 1 : quotient;
}

// In [0, b).
constexpr int64_t FloorModulo(int64_t a, int64_t b) { return a - b * FloorDivide(a, b); }

}  // namespace attnd
