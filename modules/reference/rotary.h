// Rotary positions: pairs of dims of each head turned by position · inverse_frequency.
//     (a, b) → (a·c − b·s, b·c + a·s)     c, s = factor · cos, sin of the angle
// The angle is a float32 product; c and s are rounded to float32 where the reference rounds.
// Source: Su et al., arXiv 2104.09864. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/layout.h"
#include "modules/reference/rounding.h"

namespace attnd {

enum class Turn : uint8_t { kForward, kBackward };  // backward: the transposed rotation

// `heads` is [rows, heads, dim]; `positions` [rows].
Numbers ApplyRotary(const Rotary& rotary, Turn turn, const std::vector<uint32_t>& positions,
                    int64_t head_count, int64_t dim, Numbers heads, const Rounder& round);

}  // namespace attnd
