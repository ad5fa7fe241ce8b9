// Rotary position embedding of heads in place, forward and back. Any thread; rows share nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/dense/pointwise.h"
#include "modules/layout.h"

namespace attnd {

enum class TurnDirection : uint8_t { kForward, kBackward };

// `heads` is [rows, head_count, dim]; row r stands at positions[r].
struct RotaryHeads {
  Tensor heads;
  int64_t head_count = 0, dim = 0;
};
void TurnRows(const Rotary& rotary, TurnDirection direction, const std::vector<uint32_t>& positions,
              const RotaryHeads& heads, IndexRange rows);

}  // namespace attnd
