#include "base/free_ranges.h"

#include <iterator>
#include <utility>

namespace attnd {

std::optional<int64_t> FreeRanges::Take(int64_t bytes) {
  auto gap = by_size_.lower_bound({bytes, 0});
  if (gap == by_size_.end()) return std::nullopt;
  auto [size, offset] = *gap;
  size > bytes ? Change(offset, size, offset + bytes, size - bytes) : Remove(offset, size);
  return offset;
}

void FreeRanges::Give(int64_t offset, int64_t size) {
  auto next = by_offset_.lower_bound(offset);
  std::optional<std::pair<int64_t, int64_t>> before, after;  // offset and size of gaps that touch
  if (next != by_offset_.end() && next->first == offset + size) after = *next;
  if (next != by_offset_.begin()) {
    const auto& [gap_offset, gap_size] = *std::prev(next);
    if (gap_offset + gap_size == offset) before = {gap_offset, gap_size};
  }
  if (before && after) {
    Remove(after->first, after->second);
    size += after->second;
  }
  if (before) {
    Change(before->first, before->second, before->first, before->second + size);
  } else if (after) {
    Change(after->first, after->second, offset, size + after->second);
  } else {
    Add(offset, size);
  }
}

void FreeRanges::Change(int64_t offset, int64_t size, int64_t new_offset, int64_t new_size) {
  auto by_offset = by_offset_.extract(offset);
  by_offset.key() = new_offset;
  by_offset.mapped() = new_size;
  by_offset_.insert(std::move(by_offset));
  auto by_size = by_size_.extract({size, offset});
  by_size.value() = {new_size, new_offset};
  by_size_.insert(std::move(by_size));
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
