// Holds the inputs of a call of the reference, and what the call keeps. Values; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/call_rows.h"
#include "modules/graph.h"
#include "modules/kept_values.h"
#include "modules/reference/rounding.h"

namespace attnd {

// The inputs that both directions of a call read.
struct ModuleInputs {
  CallRows rows;
  CallDropout dropout;
  LayerRange layers = {};  // that the call runs
  Numbers x;
  Numbers memory;                  // empty without
  std::vector<uint8_t> mask_bits;  // iff rows.bool_mask
};

// One layer's values that Forward keeps for Backward: those that KeptValues names.
struct KeptLayer {
  Recompute recompute = Recompute::kNone;
  std::vector<Numbers> values;  // [ops + 2], empty: not kept
  std::vector<Numbers> lse;     // [ops], of attention ops; empty with the value
};

}  // namespace attnd
