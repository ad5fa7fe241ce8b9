#include "base/free_ranges.h"

#include <iterator>

namespace attnd {

std::optional<int64_t> FreeRanges::Take(int64_t bytes) {
  auto gap = by_size_.lower_bound({bytes, 0});
  if (gap == by_size_.end()) return std::nullopt;
  auto [size, offset] = *gap;
  Remove(offset, size);
  if (size > bytes) Add(offset + bytes, size - bytes);
  return offset;
}

void FreeRanges::Give(int64_t offset, int64_t size) {
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first == offset + size) {
    auto [gap_offset, gap_size] = *next;
    Remove(gap_offset, gap_size);
    size += gap_size;
  }
  auto after = by_offset_.lower_bound(offset);
  if (after != by_offset_.begin()) {
    auto [gap_offset, gap_size] = *std::prev(after);
    if (gap_offset + gap_size == offset) {
      Remove(gap_offset, gap_size);
      offset = gap_offset;
      size += gap_size;
    }
  }
  Add(offset, size);
}

void FreeRanges::Add(int64_t offset, int64_t size) {
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
}

void FreeRanges::Remove(int64_t offset, int64_t size) {
  by_offset_.erase(offset);
  by_size_.erase({size, offset});
}

}  // namespace attnd
