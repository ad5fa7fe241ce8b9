// FreeRanges: which bytes of [0, capacity) are free. Takes the smallest gap that is large enough
// and joins neighbours when they come back. Sizes and offsets keep whatever alignment its user
// gives all sizes. Not thread-safe: its owner locks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace attnd {

class FreeRanges {
 public:
  explicit FreeRanges(int64_t capacity) { Add(0, capacity); }

  // The offset of `bytes` (above 0) bytes, or nothing when no gap is large enough.
  std::optional<int64_t> Take(int64_t bytes);
  // Exactly what Take gave, or parts of it.
  void Give(int64_t offset, int64_t bytes);

 private:
  void Add(int64_t offset, int64_t size);
  void Remove(int64_t offset, int64_t size);
  // Without an allocation.
  void Change(int64_t offset, int64_t size, int64_t new_offset, int64_t new_size);

  std::map<int64_t, int64_t> by_offset_;           // offset → size
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, offset)
};

}  // namespace attnd
