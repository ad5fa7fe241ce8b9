// Move-only owners of what the driver API hands out. Each remembers its Driver, which outlives it;
// each is destroyed with its context current on the destroying thread (Context::MakeCurrent). What
// enqueues work takes a StreamRef first; nothing here uses the default stream.
//
// Errors: INTERNAL with the call's name (Driver::Check). Threads: one at a time per object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/driver/driver.h"
#include "kernels/rules/params.h"

namespace attnd {

// Raw handle plus the driver call that returns it. An empty Handle owns nothing.
template <class Raw, auto kRelease>
class Handle {
 public:
  Handle() = default;
  Handle(const Driver& driver, Raw raw) : driver_(&driver), raw_(raw) {}
  Handle(Handle&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)), raw_(std::exchange(other.raw_, Raw())) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Handle() {
    // A failure here means a lost context, which every other call tells as well.
    if (driver_ != nullptr && raw_ != Raw()) (driver_->functions().*kRelease)(raw_);
  }

  Raw raw() const { return raw_; }
  const Driver& driver() const { return *driver_; }
  explicit operator bool() const { return raw_ != Raw(); }

 private:
  const Driver* driver_ = nullptr;
  Raw raw_ = Raw();
};

// The device's primary context, shared with every other user in this process.
class Context {
 public:
  static absl::StatusOr<Context> Retain(const Driver& driver, int ordinal);
  Context() = default;
  Context(Context&& other) noexcept { *this = std::move(other); }
  Context& operator=(Context&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(device_, other.device_);
    std::swap(context_, other.context_);
    return *this;
  }
  ~Context();

  // Once on each thread that uses the device.
  absl::Status MakeCurrent() const;
  absl::Status Synchronize() const;
  // Free and total bytes of device memory.
  absl::StatusOr<std::pair<int64_t, int64_t>> MemoryInfo() const;
  const Driver& driver() const { return *driver_; }
  explicit operator bool() const { return context_ != nullptr; }

 private:
  const Driver* driver_ = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

class Event {
 public:
  // Timed events measure; the others only order, and cost less.
  static absl::StatusOr<Event> Create(const Driver& driver, bool timed);
  CUevent raw() const { return handle_.raw(); }
  absl::StatusOr<bool> HasPassed() const;
  // Seconds from `start` to this; both have passed.
  absl::StatusOr<double> SecondsSince(const Event& start) const;

 private:
  Handle<CUevent, &DriverFunctions::event_destroy> handle_;
};

// Device memory as bytes. No host dereference.
struct DeviceAddress {
  CUdeviceptr value = 0;
  DeviceAddress operator+(int64_t bytes) const { return {value + static_cast<uint64_t>(bytes)}; }
  friend bool operator==(DeviceAddress, DeviceAddress) = default;
};

// Page-locked host memory: copies from and to it can overlap with kernels.
class PinnedMemory {
 public:
  static absl::StatusOr<PinnedMemory> Allocate(const Driver& driver, int64_t bytes);
  absl::Span<std::byte> bytes() const {
    return {static_cast<std::byte*>(handle_.raw()), static_cast<size_t>(bytes_)};
  }

 private:
  Handle<void*, &DriverFunctions::host_free> handle_;
  int64_t bytes_ = 0;
};

// Makes memory that is there already page-locked, for every context of the process, while it lives.
class PinnedRange {
 public:
  static absl::StatusOr<PinnedRange> Register(const Driver& driver, absl::Span<std::byte> memory);

 private:
  Handle<void*, &DriverFunctions::host_unregister> handle_;
};

// A compiled kernel image; functions live as long as it.
class Module {
 public:
  // `image` is a cubin; it may be freed afterwards.
  static absl::StatusOr<Module> Load(const Driver& driver, const void* image);
  absl::StatusOr<CUfunction> Function(const char* name) const;

 private:
  Handle<CUmodule, &DriverFunctions::module_unload> handle_;
};

// Lets a function use more dynamic shared memory than 48 KiB.
absl::Status AllowDynamicShared(const Driver& driver, CUfunction function, int64_t bytes);

// Boxes come with a swizzle of 128 bytes.
absl::StatusOr<TensorMap> EncodeTensorMap(const Driver& driver, const RowsBox& box);

// Work for a stream: nothing waits for it here. Host memory of a copy and arguments' targets must
// outlive the work; argument values are copied at the call.
class StreamRef {
 public:
  StreamRef() = default;
  StreamRef(const Driver& driver, CUstream stream) : driver_(&driver), stream_(stream) {}
  absl::Status CopyIn(DeviceAddress to, const void* from, int64_t bytes) const;
  absl::Status CopyOut(void* to, DeviceAddress from, int64_t bytes) const;
  // Rows of `bytes` each; a pitch is the distance of one row's begin from the one's before.
  struct Rows {
    int64_t count, bytes, host_pitch, device_pitch;
  };
  absl::Status CopyRowsIn(DeviceAddress to, const void* from, const Rows& rows) const;
  absl::Status CopyRowsOut(void* to, DeviceAddress from, const Rows& rows) const;
  absl::Status SetZero(DeviceAddress at, int64_t bytes) const;
  absl::Status Record(const Event& event) const;
  absl::Status Wait(const Event& event) const;
  absl::Status Synchronize() const;
  struct Grid {
    uint32_t blocks = 1;
    uint32_t threads = 32;
    uint32_t shared_bytes = 0;
    bool overlaps = false;  // blocks may start before the launch ahead has ended, if it lets them
  };
  absl::Status Launch(CUfunction function, Grid grid, absl::Span<void* const> arguments) const;
  CUstream raw() const { return stream_; }

 private:
  absl::Status LaunchOverlapping(CUfunction function, const Grid& grid,
                                 absl::Span<void* const> arguments) const;

  const Driver* driver_ = nullptr;
  CUstream stream_ = nullptr;
};

class Stream {
 public:
  static absl::StatusOr<Stream> Create(const Driver& driver);
  StreamRef ref() const { return {handle_.driver(), handle_.raw()}; }

 private:
  Handle<CUstream, &DriverFunctions::stream_destroy> handle_;
};

}  // namespace attnd
