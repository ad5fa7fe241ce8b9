// PoolMap: where a pool's blocks lie, for what the driver does not tell: how its free memory is cut
// up. The pool's first allocation takes all of it, and later ones come out of the same addresses;
// what the driver should put elsewhere is not counted. Free memory that lies apart is no loss as
// long as the driver can map it side by side, so this is the worst case. Any thread.
#pragma once

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class PoolMap {
 public:
  struct Free {
    int64_t bytes = 0, largest = 0;
  };

  void SetRange(uint64_t begin, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    begin_ = begin;
    end_ = begin + static_cast<uint64_t>(bytes);
  }
  void Add(uint64_t address, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    blocks_[address] = bytes;
    ++allocations_;
  }
  void Remove(uint64_t address) {
    absl::MutexLock lock(&mutex_);
    blocks_.erase(address);
  }
  // Walks all blocks: launches at work and residuals.
  Free FreeMemory() const {
    absl::MutexLock lock(&mutex_);
    Free free;
    uint64_t at = begin_;
    for (auto block = blocks_.lower_bound(begin_); block != blocks_.end(); ++block) {
      if (block->first >= end_) break;
      AddGap(at, block->first, free);
      at = block->first + static_cast<uint64_t>(block->second);
    }
    AddGap(at, end_, free);
    return free;
  }
  int64_t allocations() const {
    absl::MutexLock lock(&mutex_);
    return allocations_;
  }

 private:
  static void AddGap(uint64_t begin, uint64_t end, Free& free) {
    if (end <= begin) return;
    const auto bytes = static_cast<int64_t>(end - begin);
    free.bytes += bytes;
    free.largest = free.largest < bytes ? bytes : free.largest;
  }

  mutable absl::Mutex mutex_;
  uint64_t begin_ ABSL_GUARDED_BY(mutex_) = 0, end_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, int64_t> blocks_ ABSL_GUARDED_BY(mutex_);  // address → bytes
  int64_t allocations_ ABSL_GUARDED_BY(mutex_) = 0;             // since the start
};

}  // namespace attnd
