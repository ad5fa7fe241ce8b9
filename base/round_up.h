// RoundUp: the least multiple of `step` that is not less than `value`; DivideUp: how many steps
// that is. Both are at least 0, step above.
#pragma once

#include <cstdint>

namespace attnd {

constexpr int64_t DivideUp(int64_t value, int64_t step) { return (value + step - 1) / step; }
constexpr int64_t RoundUp(int64_t value, int64_t step) { return DivideUp(value, step) * step; }

}  // namespace attnd
