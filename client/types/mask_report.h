// MaskReport: what one daemon tells about a mask by description.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/masks/mask_description.h"

namespace attnd {

// How one device runs calls with it.
struct MaskOnDevice {
  std::string device;
  std::string kernel_forward, kernel_backward;  // empty: none, and `reason` says what to do
  std::string reason;
  int64_t tile_rows = 0, tile_keys = 0;  // a tile's size
  // Over all batch entries and heads: all, those that show everything, and something.
  int64_t tiles = 0, tiles_full = 0, tiles_partial = 0;
  int64_t distinct_bitmaps = 0;
  int64_t plan_bytes = 0;
  int64_t compile_nanoseconds = 0;
};

struct MaskReport {
  MaskId id = {};
  int64_t bytes_held = 0;  // by the daemon
  int64_t visible = 0;     // (b, h, i, j) that it shows, before causal, window and lengths
  int64_t empty_rows = 0;  // of all batch entries and heads
  std::vector<MaskOnDevice> devices;
};

}  // namespace attnd
