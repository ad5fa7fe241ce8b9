// KernelDevice: what the cuda engine needs of a device: one arena, copies, launches. A GPU is one
// (driver_device.h), the emulator another (emulated_device.h), so that the same host code prepares
// work for both.
//
// Order of use for a launch: Reserve → CopyIn, SetZero → Run, as often as the launch has steps →
// Finish → CopyOut. Addresses are the device's; the host never follows them. One thread at a time.
// Errors: of the device, as it tells them; RESOURCE_EXHAUSTED when the arena cannot grow.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/params.h"
#include "kernels/tiles.h"

namespace attnd::cuda {

// What a launch may do with a part of the arena. The emulator holds kernels to it.
enum class RegionUse : uint8_t {
  kInput,   // written by the host before the launch; read only
  kZeroed,  // zeros before the launch; read and written
  kOutput,  // written by the launch before it is read
};

struct Region {
  std::string name;
  int64_t offset = 0;  // in the arena, a multiple of kRegionAlignment
  int64_t bytes = 0;
  RegionUse use = RegionUse::kInput;
};
inline constexpr int64_t kRegionAlignment = 256;

class KernelDevice {
 public:
  virtual ~KernelDevice() = default;
  virtual const BackendInfo& info() const = 0;
  // OK where Run can run this row, else UNIMPLEMENTED saying what is missing.
  virtual absl::Status Check(const KernelRow& row) const = 0;

  // The arena's address, at least as long as the regions; its old contents are lost.
  virtual absl::StatusOr<uint64_t> Reserve(int64_t bytes, absl::Span<const Region> regions) = 0;
  virtual absl::Status CopyIn(uint64_t to, const void* from, int64_t bytes) = 0;
  virtual absl::Status CopyOut(void* to, uint64_t from, int64_t bytes) = 0;
  virtual absl::Status SetZero(uint64_t at, int64_t bytes) = 0;
  // One kernel over params.tile_count blocks; steps run in the order of the calls.
  virtual absl::Status Run(const KernelRow& row, const LaunchParams& params) = 0;
  // Waits; seconds that the kernels since Reserve took.
  virtual absl::StatusOr<double> Finish() = 0;
};

}  // namespace attnd::cuda
