// MemoryPool: one GPU's memory for launches: a stream-ordered pool of the driver (CUDA Driver API,
// "Stream Ordered Memory Allocator") that takes all its memory at the start and gives none back, so
// that an allocation is a matter of the driver's lists, never of the operating system, and never
// waits for the device. Bytes are rounded up to kPoolGranularity.
//
// Errors: RESOURCE_EXHAUSTED when the memory is not there; else INTERNAL with the call's name.
// Threads: any. Blocks do not outlive the pool, nor the stream they were allocated on.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/driver/handles.h"
#include "kernels/cuda/driver/pool_map.h"

namespace attnd {

inline constexpr int64_t kPoolGranularity = 512;

// Device memory out of a pool. Given back in the order of its stream when it dies: what still uses
// it must have been waited for, or stand before in that stream.
class PoolBlock {
 public:
  PoolBlock() = default;
  PoolBlock(PoolBlock&& other) noexcept { *this = std::move(other); }
  PoolBlock& operator=(PoolBlock&& other) noexcept;
  ~PoolBlock();

  DeviceAddress address() const { return {raw_}; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class MemoryPool;
  const Driver* driver_ = nullptr;
  StreamRef stream_;
  PoolMap* map_ = nullptr;  // the pool's
  CUdeviceptr raw_ = 0;
  int64_t bytes_ = 0;
};

class MemoryPool {
 public:
  // Takes `bytes` from the device now. `stream` is of the device's current context; waits for it.
  static absl::StatusOr<MemoryPool> Create(const Driver& driver, int ordinal, int64_t bytes,
                                           StreamRef stream);

  absl::StatusOr<PoolBlock> Allocate(StreamRef stream, int64_t bytes) const;
  // Bytes held from the driver: constant unless an allocation made the pool grow.
  absl::StatusOr<int64_t> ReservedBytes() const;
  const PoolMap& map() const { return *map_; }

 private:
  absl::Status KeepAll() const;
  Handle<CUmemoryPool, &DriverFunctions::pool_destroy> handle_;
  std::unique_ptr<PoolMap> map_ = std::make_unique<PoolMap>();  // its place is known to blocks
};

}  // namespace attnd
