// MaskLayout: where a mask's lists lie in a piece of device memory (TileLists,
// kernels/rules/params.h): those of a mask by description, which the host fills in, and those of a
// bool mask, which a kernel fills in (kernels/rules/mask_tiles.h). Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "attention/masks/compiled_mask.h"
#include "attention/problem.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// The tiles of a kernel: in lines of its key tiles (backward) or of its row tiles.
struct MaskTiling {
  int rows = 0, keys = 0;
  bool by_keys = false;
  LaneOrder lanes = kLanesOfSm70;
};
MaskCompileOptions OptionsOf(const MaskTiling& tiling);

struct MaskLayout {
  TileLists lists = {};                                     // without addresses
  int64_t lines = 0, tiles = 0, bitmaps = 0, plan_of = -1;  // bytes from its start; −1: none
  int64_t bytes = 0;                                        // 0: no mask
};

MaskLayout LayOutBoolMask(const BroadcastShape& mask, const MaskTiling& tiling);
// Lays out a mask compiled with OptionsOf(tiling). 4 bytes a listed tile, 16 a line, and its
// bitmaps.
MaskLayout LayOutMask(const CompiledMask& compiled, const Problem& problem,
                      const MaskTiling& tiling);
// OK, or UNIMPLEMENTED: more bitmaps than a list can number.
absl::Status CheckMask(const CompiledMask& compiled);

// Makes the bytes of that layout, MaskLayout::bytes long.
std::vector<std::byte> MaskImage(const CompiledMask& compiled, const Problem& problem,
                                 const MaskLayout& layout);

// At a device address, for a part whose first (b, h) is (entry, q_head).
TileLists ListsAt(const MaskLayout& layout, uint64_t address, int64_t entry, int64_t q_head);

}  // namespace attnd::cuda
