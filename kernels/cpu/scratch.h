// Hands out a thread's scratch (tiles.h) piece by piece, each aligned to a cache line.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/round_up.h"
#include "kernels/cpu/tiles.h"

namespace attnd {

class ScratchArena {
 public:
  explicit ScratchArena(float* scratch) : next_(scratch), end_(scratch + kScratchFloats) {}

  float* Floats(int64_t count) {
    float* place = next_;
    next_ += RoundUp(count, kMaxLanes);
    CHECK(next_ <= end_);
    return place;
  }
  uint8_t* Bytes(int64_t count) { return reinterpret_cast<uint8_t*>(Floats((count + 3) / 4)); }
  uint16_t* Words(int64_t count) { return reinterpret_cast<uint16_t*>(Floats((count + 1) / 2)); }

 private:
  float* next_;
  float* end_;
};

}  // namespace attnd
