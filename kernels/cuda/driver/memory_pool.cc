#include "kernels/cuda/driver/memory_pool.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

// From CUDA 12.2 on a pool has a limit; older drivers want that field to be zero.
constexpr int kPoolLimitVersion = 12020;

}  // namespace

PoolBlock& PoolBlock::operator=(PoolBlock&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(stream_, other.stream_);
  std::swap(map_, other.map_);
  std::swap(raw_, other.raw_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PoolBlock::~PoolBlock() {
  // A failure here means a lost context, which every other call tells as well.
  if (raw_ == 0) return;
  map_->Remove(raw_);
  driver_->functions().pool_free(raw_, stream_.raw());
}

absl::StatusOr<MemoryPool> MemoryPool::Create(const Driver& driver, int ordinal, int64_t bytes,
                                              StreamRef stream) {
  CUmemPoolProps properties = {};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
  if (driver.version() >= kPoolLimitVersion) properties.maxSize = static_cast<size_t>(bytes);
  CUmemoryPool raw = nullptr;
  RETURN_IF_ERROR(
      driver.Check(driver.functions().pool_create(&raw, &properties), "cuMemPoolCreate"));
  MemoryPool pool;
  pool.handle_ = {driver, raw};
  RETURN_IF_ERROR(pool.KeepAll());
  {
    ASSIGN_OR_RETURN(const PoolBlock all, pool.Allocate(stream, bytes));
    pool.map_->SetRange(all.address().value, all.bytes());
  }
  RETURN_IF_ERROR(stream.Synchronize());
  return pool;
}

absl::Status MemoryPool::KeepAll() const {
  const Driver& driver = handle_.driver();
  cuuint64_t threshold = std::numeric_limits<cuuint64_t>::max();
  return driver.Check(driver.functions().pool_set_attribute(
                          handle_.raw(), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold),
                      "cuMemPoolSetAttribute");
}

absl::StatusOr<PoolBlock> MemoryPool::Allocate(StreamRef stream, int64_t bytes) const {
  const Driver& driver = handle_.driver();
  PoolBlock block;
  block.bytes_ = RoundUp(bytes, kPoolGranularity);
  CUresult result = driver.functions().pool_allocate(&block.raw_, static_cast<size_t>(block.bytes_),
                                                     handle_.raw(), stream.raw());
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the GPU's memory pool has no room for ", bytes, " bytes"));
  }
  RETURN_IF_ERROR(driver.Check(result, "cuMemAllocFromPoolAsync"));
  block.driver_ = &driver;
  block.stream_ = stream;
  block.map_ = map_.get();
  map_->Add(block.raw_, block.bytes_);
  return block;
}

absl::StatusOr<int64_t> MemoryPool::ReservedBytes() const {
  const Driver& driver = handle_.driver();
  cuuint64_t bytes = 0;
  RETURN_IF_ERROR(driver.Check(driver.functions().pool_get_attribute(
                                   handle_.raw(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes),
                               "cuMemPoolGetAttribute"));
  return static_cast<int64_t>(bytes);
}

}  // namespace attnd
