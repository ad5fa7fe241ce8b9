// Rotary position embedding of heads in place, forward and back. Any thread; rows share nothing.
#pragma once

#include "kernels/cpu/dense/pointwise.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

void TurnRows(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads,
              IndexRange rows);

}  // namespace attnd
