// KernelDevice: what the cuda engine needs of a device. A GPU is one (driver_device.h), the
// emulator another (emulated_device.h), so that the same host code prepares work for both.
//
// A DeviceLaunch is one launch on its way through the device; several are on their way at once, so
// that one uploads while another computes and a third downloads:
//
//   Begin → Upload, UploadCopy, SetZero → Run, once a slice → Download → Finish
//
// More may be uploaded and downloaded between two slices. The second waits for the upload, which
// does not wait for the first: that may still be at work. A download waits for the first, but the
// second does not wait for the download, and leaves the bytes as they are.
//
// Nothing waits for the device but Begin (for memory that other launches hold), Run (for its turn:
// at most two slices stand in the compute queue, of one launch or of two) and Finish. Addresses are
// the device's; the host never follows them. Threads: launches by any thread, each by one at a
// time. Errors: of the device, as it tells them; RESOURCE_EXHAUSTED when memory is not there at
// all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/rules/params.h"
#include "kernels/tiles.h"

namespace attnd::cuda {

// Says what a launch may do with a part of the arena. The emulator holds kernels to it.
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
// As the host aligns tensors, so that neighbours there are neighbours here.
inline constexpr int64_t kRegionAlignment = 64;

// One kernel over params.tile_count blocks.
struct KernelStep {
  KernelRow row;
  LaunchParams params;
};

// Bytes between host and device, either way: rows of `bytes` each, at these distances.
struct HostCopy {
  uint64_t device = 0;
  std::byte* host = nullptr;
  int64_t bytes = 0;
  int64_t rows = 1;
  int64_t device_pitch = 0, host_pitch = 0;  // of one row: any

  int64_t total() const { return rows * bytes; }
};

// Seconds that a launch took of each part of the device; of copies those before the first slice and
// after the last one, since kernels run meanwhile beside the others.
struct DeviceTimes {
  double upload = 0, kernel = 0, download = 0;
};

// Device memory that outlives launches. Given back when it dies, on any thread: no launch that uses
// it is at work by then.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual uint64_t address() const = 0;
  virtual int64_t bytes() const = 0;
};

// A part of it.
struct DevicePart {
  const DeviceMemory* memory = nullptr;
  int64_t offset = 0, bytes = 0;
  uint64_t address() const { return memory->address() + static_cast<uint64_t>(offset); }
};

class DeviceLaunch {
 public:
  // Waits for what is still at work, then gives the arena back.
  virtual ~DeviceLaunch() = default;
  virtual uint64_t arena() const = 0;
  // The kernels use this memory too, which outlives the launch. For devices that check accesses.
  virtual void Use(const DeviceMemory&, absl::Span<const Region>) {}

  // The host's bytes stay as they are until Finish; page-locked memory is read by the device
  // itself.
  virtual absl::Status Upload(const HostCopy& copy) = 0;
  // `from` may go at once. For small things: it is copied twice.
  virtual absl::Status UploadCopy(uint64_t to, const void* from, int64_t bytes) = 0;
  virtual absl::Status SetZero(uint64_t at, int64_t bytes) = 0;
  // Kernels in order, after all uploads so far and the slice before. When its turn has come,
  // `wanted` is asked: if false, nothing runs and the result is false.
  virtual absl::StatusOr<bool> Run(absl::Span<const KernelStep> steps,
                                   const std::function<bool()>& wanted) = 0;
  // After the slices so far. The host's memory stays until Finish.
  virtual absl::Status Download(const HostCopy& copy) = 0;
  virtual absl::StatusOr<DeviceTimes> Finish() = 0;
};

// A stream for work that another library enqueues, beside those of launches. What stands in it has
// ended when it goes. One thread at a time.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  // Makes the device the calling thread's.
  virtual absl::Status Enter() = 0;
  virtual void* raw() const = 0;  // CUstream
  virtual absl::Status Mark() = 0;
  // Whether what stood in the stream at the last Mark has ended.
  virtual absl::StatusOr<bool> HasPassedMark() const = 0;
};

class KernelDevice {
 public:
  virtual ~KernelDevice() = default;
  virtual const BackendInfo& info() const = 0;
  // Names the driver and the kernels: with info all that a kernel's time depends on.
  virtual std::string Versions() const { return ""; }
  virtual int multiprocessors() const = 0;
  // The kernel table, of which calls are made here.
  virtual const std::vector<KernelRow>& rows() const = 0;
  // As the kernels of this device read it.
  virtual absl::StatusOr<TensorMap> Encode(const RowsBox& box) const = 0;
  // OK where Run can run this row, else UNIMPLEMENTED saying what is missing.
  virtual absl::Status Check(const KernelRow& row) const = 0;
  // An arena at least as long as the regions, contents arbitrary.
  virtual absl::StatusOr<std::unique_ptr<DeviceLaunch>> Begin(int64_t bytes,
                                                              absl::Span<const Region> regions) = 0;
  // The same with an arena in memory that is held, and outlives the launch; the kernels read and
  // write the rest of that memory too. Never waits for memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceLaunch>> BeginIn(
      const DevicePart& arena, absl::Span<const Region> regions) = 0;
  // Null when so much is not there just now: it does not wait.
  virtual std::unique_ptr<DeviceMemory> Hold(int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() = 0;
  // How much of Hold's memory lists of masks may take; launches are not counted on it.
  virtual int64_t mask_bytes() const = 0;
  // See Backend.
  virtual absl::Status RegisterHost(absl::Span<std::byte>) { return absl::OkStatus(); }
  virtual void UnregisterHost(absl::Span<std::byte>) {}
  // How long one slice may take, in seconds.
  virtual double max_slice_seconds() const = 0;
  virtual DeviceUse use() const { return {}; }
};

}  // namespace attnd::cuda
