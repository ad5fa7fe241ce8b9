#include "server/admission/staging_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/free_ranges.h"

namespace attnd {

class StagingArena {
 public:
  StagingArena(std::byte* base, int64_t capacity)
      : base_(base), capacity_(capacity), free_(capacity) {}
  ~StagingArena() { munmap(base_, static_cast<size_t>(capacity_)); }

  std::byte* TryTake(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    std::optional<int64_t> offset = free_.Take(bytes);
    if (!offset.has_value()) return nullptr;
    used_ += bytes;
    peak_used_ = std::max(peak_used_, used_);
    return base_ + *offset;
  }

  void Give(std::byte* data, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    used_ -= bytes;
    free_.Give(data - base_, bytes);
  }

  int64_t capacity() const { return capacity_; }
  absl::Span<std::byte> memory() const {
    return absl::MakeSpan(base_, static_cast<size_t>(capacity_));
  }
  int64_t used() const {
    absl::MutexLock lock(&mutex_);
    return used_;
  }
  int64_t peak_used() const {
    absl::MutexLock lock(&mutex_);
    return peak_used_;
  }

 private:
  std::byte* const base_;
  const int64_t capacity_;
  mutable absl::Mutex mutex_;
  FreeRanges free_ ABSL_GUARDED_BY(mutex_);
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t peak_used_ ABSL_GUARDED_BY(mutex_) = 0;
};

StagingBlock& StagingBlock::operator=(StagingBlock&& other) noexcept {
  if (this == &other) return *this;
  Release();
  arena_ = std::move(other.arena_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void StagingBlock::Release() {
  if (arena_ != nullptr) arena_->Give(data_, size_);
  arena_.reset();
  data_ = nullptr;
  size_ = 0;
}

StagingBlock StagingBlock::SplitOff(int64_t bytes) {
  CHECK(bytes % kStagingAlignment == 0 && bytes >= 0 && bytes <= size_);
  if (bytes == size_) return StagingBlock();
  StagingBlock rest(arena_, data_ + bytes, size_ - bytes);
  size_ = bytes;
  if (bytes == 0) {
    arena_.reset();
    data_ = nullptr;
  }
  return rest;
}

absl::StatusOr<StagingPool> StagingPool::Create(int64_t capacity_bytes) {
  int64_t capacity = AlignedSize(capacity_bytes);
  CHECK(capacity > 0);
  void* base = mmap(nullptr, static_cast<size_t>(capacity), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot reserve ", capacity,
                                                     " bytes of staging memory: ", strerror(errno),
                                                     "; lower --memory_limit_mib"));
  }
  // Advice only: huge pages save page faults, and a core dump shall not hold callers' tensors.
  madvise(base, static_cast<size_t>(capacity), MADV_HUGEPAGE);
  madvise(base, static_cast<size_t>(capacity), MADV_DONTDUMP);
  return StagingPool(std::make_shared<StagingArena>(static_cast<std::byte*>(base), capacity));
}

std::optional<StagingBlock> StagingPool::TryAcquire(int64_t bytes) {
  if (bytes == 0) return StagingBlock();
  std::byte* data = arena_->TryTake(AlignedSize(bytes));
  if (data == nullptr) return std::nullopt;
  return StagingBlock(arena_, data, AlignedSize(bytes));
}

absl::Span<std::byte> StagingPool::memory() const { return arena_->memory(); }
int64_t StagingPool::capacity() const { return arena_->capacity(); }
int64_t StagingPool::used() const { return arena_->used(); }
int64_t StagingPool::peak_used() const { return arena_->peak_used(); }

}  // namespace attnd
