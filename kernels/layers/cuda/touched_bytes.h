// TouchedBytes: which bytes of a GPU's memory launches read and write that are not queued yet, and
// so may come after others. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace attnd {

// A launch has no more descriptors: each block looks for its own.
inline constexpr size_t kMostLaunchedTogether = 64;

struct ByteRange {
  uint64_t begin = 0, end = 0;
  static ByteRange At(const void* data, int64_t bytes) {
    const auto begin = reinterpret_cast<uint64_t>(data);
    return {begin, begin + static_cast<uint64_t>(bytes)};
  }
  bool Meets(const ByteRange& other) const {
    return std::max(begin, other.begin) < std::min(end, other.end);
  }
};

class TouchedBytes {
 public:
  void Add(absl::Span<const ByteRange> reads, absl::Span<const ByteRange> writes) {
    reads_.insert(reads_.end(), reads.begin(), reads.end());
    writes_.insert(writes_.end(), writes.begin(), writes.end());
  }
  void Clear() {
    reads_.clear();
    writes_.clear();
  }
  bool AreWritten(const ByteRange& range) const { return Meets(writes_, range); }
  bool AreRead(const ByteRange& range) const { return Meets(reads_, range); }
  bool AreTouched(const ByteRange& range) const { return AreWritten(range) || AreRead(range); }
  // Whether a launch that reads and writes these ranges has to stay behind one that is here.
  bool Meet(absl::Span<const ByteRange> reads, absl::Span<const ByteRange> writes) const {
    return std::any_of(reads.begin(), reads.end(),
                       [this](const ByteRange& range) { return AreWritten(range); }) ||
           std::any_of(writes.begin(), writes.end(),
                       [this](const ByteRange& range) { return AreTouched(range); });
  }

 private:
  static bool Meets(const std::vector<ByteRange>& ranges, const ByteRange& range) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&range](const ByteRange& of) { return of.Meets(range); });
  }
  std::vector<ByteRange> reads_, writes_;
};

}  // namespace attnd
