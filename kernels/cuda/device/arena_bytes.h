// ArenaBytes: what a launch's memory on a GPU is for, as DeviceUse tells it.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/device/kernel_device.h"

namespace attnd::cuda {

// Bytes of a launch, or of what it leaves, by what they are for.
struct ArenaBytes {
  int64_t input = 0, output = 0, workspace = 0, lease = 0;
};
inline ArenaBytes BytesByUse(int64_t total, absl::Span<const Region> regions) {
  ArenaBytes bytes;
  for (const Region& region : regions) {
    if (region.use == RegionUse::kInput) bytes.input += region.bytes;
    if (region.use == RegionUse::kOutput) bytes.output += region.bytes;
  }
  bytes.workspace = total - bytes.input - bytes.output;
  return bytes;
}

}  // namespace attnd::cuda
