// StagingPool: the host memory in which tensors land and from which replies are sent. One arena,
// reserved at start and touched as it is used; blocks are 64-byte aligned, best fit, coalesced when
// they are freed. No allocation from the OS on the request path.
// A block may outlive the server inside a gRPC slice, so it shares the arena: the last owner frees
// it. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace attnd {

inline constexpr int64_t kStagingAlignment = 64;

constexpr int64_t AlignedSize(int64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

class StagingArena;

// Move-only; frees its memory when destroyed. Empty when default-constructed.
class StagingBlock {
 public:
  StagingBlock() = default;
  StagingBlock(StagingBlock&& other) noexcept { *this = std::move(other); }
  StagingBlock& operator=(StagingBlock&& other) noexcept;
  ~StagingBlock() { Release(); }

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  void Release();
  // Keeps the first `bytes` (a multiple of 64) and returns the rest as a block of its own.
  StagingBlock SplitOff(int64_t bytes);

 private:
  friend class StagingPool;
  StagingBlock(std::shared_ptr<StagingArena> arena, std::byte* data, int64_t size)
      : arena_(std::move(arena)), data_(data), size_(size) {}

  std::shared_ptr<StagingArena> arena_;  // shared with the pool and every other block
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

class StagingPool {
 public:
  // RESOURCE_EXHAUSTED when the address space cannot be had.
  static absl::StatusOr<StagingPool> Create(int64_t capacity_bytes);

  // Nothing when no gap is large enough right now. `bytes` of 0 gives an empty block.
  std::optional<StagingBlock> TryAcquire(int64_t bytes);

  int64_t capacity() const;
  absl::Span<std::byte> memory() const;  // all of it, to page-lock it
  int64_t used() const;
  int64_t peak_used() const;

 private:
  explicit StagingPool(std::shared_ptr<StagingArena> arena) : arena_(std::move(arena)) {}
  std::shared_ptr<StagingArena> arena_;  // shared with every block
};

}  // namespace attnd
