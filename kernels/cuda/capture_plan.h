// CapturePlan: one launch that makes the averaged attention map of a call whose forward has run
// (kernels/rules/capture_map.h): its arena, its kernels slab by slab of the map's tiles, so that
// the sums at hand fit a piece of memory whatever the map's size, and what they give. Pure; nothing
// here touches a device.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/patterns/captured_map.h"
#include "base/round_up.h"
#include "kernels/backend.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

struct CapturePlan {
  LaunchPlan launch;
  CaptureKernels kernels;
  CaptureDesc capture = {};  // without addresses
  int64_t tiles = 0, slab_tiles = 0;
  int64_t cells = 0;  // of all tiles
  int64_t sums_at = -1, cells_at = -1, moments_at = -1, map_at = -1, capture_at = -1;  // offsets

  int slabs() const { return static_cast<int>(DivideUp(tiles, slab_tiles)); }
  CaptureDesc Describe(uint64_t arena_address) const;  // what stands at capture_at
  std::vector<KernelStep> Slab(uint64_t arena_address, int slab) const;
};

// Tiles as the scores' loop looks them up.
MaskTiling TilingOf(const CaptureKernels& kernels);

// `mask`: of the problem for TilingOf(kernels), or without one; where it is held, it lies outside
// until PlaceMask. `slices`: at least so many slabs, but none of less than `least` blocks where
// more have room. They change no bit.
CapturePlan PlanCapture(const Problem& problem, const CaptureKernels& kernels,
                        const CaptureRequest& request, const CallMask& mask, int slices,
                        int64_t least);

// At least what that takes.
int64_t CaptureArenaBytes(const Problem& problem, const CaptureKernels& kernels,
                          const CaptureRequest& request, const CallMask& mask);

// From what the kernels left: `cells` and `moments` of all tiles, one after the other.
CapturedMap CapturedFrom(const CapturePlan& plan, const std::vector<double>& cells,
                         const std::vector<double>& moments);

}  // namespace attnd::cuda
