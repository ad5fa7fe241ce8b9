// ChunkGrid: which chunks of a payload several streams have taken, each of which brings some of
// them in any order. A chunk has kChunkBytes and begins at a multiple of that; the last one has
// what is left. One thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {

class ChunkGrid {
 public:
  explicit ChunkGrid(int64_t bytes)
      : bytes_(bytes), taken_(static_cast<size_t>((bytes + kChunkBytes - 1) / kChunkBytes)) {}

  // False: it is none of the grid's, or has been taken.
  bool Take(uint64_t offset, int64_t size) {
    const uint64_t n = offset / kChunkBytes;
    if (n >= taken_.size() || offset % kChunkBytes != 0 || taken_[n]) return false;
    if (size != std::min(kChunkBytes, bytes_ - static_cast<int64_t>(offset))) return false;
    taken_[n] = true;
    return true;
  }

 private:
  int64_t bytes_;
  std::vector<bool> taken_;
};

}  // namespace attnd
