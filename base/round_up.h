// RoundUp: the least multiple of `step` that is not less than `value`; both at least 0, step above.
#pragma once

#include <cstdint>

namespace attnd {

constexpr int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace attnd
