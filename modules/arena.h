// Arena: places for buffers that live for a while each, in as few bytes as the smallest gap that
// fits gives. Buffers whose lives overlap share no byte. A value; one thread.
#pragma once

#include <cstdint>
#include <vector>

namespace attnd {

inline constexpr int64_t kArenaAlignment = 256;  // of offsets, in bytes

struct ArenaBuffer {
  int64_t bytes = 0;
  int64_t first = 0, last = 0;  // steps in which it lives, both inclusive
  int64_t offset = -1;          // set by PlaceBuffers; −1: of no bytes
  int64_t key = 0;              // its user's, to find it again
};

// Gives each buffer its offset, in the order of `first`, and returns the arena's size. The same
// buffers get the same places. O(n log n).
int64_t PlaceBuffers(std::vector<ArenaBuffer>& buffers);

}  // namespace attnd
