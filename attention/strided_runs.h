// StridedRuns: where a shard's tensor lies inside the caller's whole tensor, as up to three nested
// loops around runs of contiguous bytes, in the order in which the wire wants them. A stride of 0
// repeats a run (a broadcast bias that a shard needs once per head). Values; any thread.
//
// RunCursor walks the runs when bytes come in pieces of any size: it scatters a reply's slices into
// the caller's array with one copy, past the caches where the tensor is too large for them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/non_temporal_copy.h"

namespace attnd {

struct StridedRuns {
  struct Loop {
    int64_t count = 1;
    int64_t stride = 0;  // bytes
  };
  int64_t offset = 0;  // of the first run, bytes from the tensor's start
  int64_t run_bytes = 0;
  std::array<Loop, 3> loops;  // slowest first

  // Folds inner loops whose runs touch into longer runs.
  static StridedRuns Make(int64_t offset, const std::array<Loop, 3>& loops, int64_t run_bytes) {
    StridedRuns runs{offset, run_bytes, {}};
    int slot = 2;  // of the next loop that cannot be folded
    for (int n = 2; n >= 0; --n) {
      if (loops[n].count == 1) continue;
      if (slot == 2 && loops[n].stride == runs.run_bytes) {
        runs.run_bytes *= loops[n].count;
      } else {
        runs.loops[slot--] = loops[n];
      }
    }
    return runs;
  }

  int64_t run_count() const { return loops[0].count * loops[1].count * loops[2].count; }
  int64_t total_bytes() const { return run_count() * run_bytes; }
  int64_t RunOffset(int64_t run) const {
    int64_t inner = run % loops[2].count, outer = run / loops[2].count;
    return offset + inner * loops[2].stride + outer % loops[1].count * loops[1].stride +
           outer / loops[1].count * loops[0].stride;
  }
};

// Copies all runs of `source` to `destination`, end to end.
inline void Gather(const StridedRuns& runs, const std::byte* source, std::byte* destination) {
  for (int64_t run = 0; run < runs.run_count(); ++run) {
    std::memcpy(destination + run * runs.run_bytes, source + runs.RunOffset(run), runs.run_bytes);
  }
}

class RunCursor {
 public:
  // Tensors of this size and more are written past the caches.
  static constexpr int64_t kCacheBytes = int64_t{4} << 20;

  RunCursor(const StridedRuns& runs, std::byte* tensor)
      : runs_(runs), tensor_(tensor), non_temporal_(runs.total_bytes() >= kCacheBytes) {}

  // The next `bytes` bytes of the wire's order. The caller has checked that they fit.
  void Scatter(const std::byte* data, int64_t bytes) {
    while (bytes > 0) {
      int64_t step = std::min(bytes, runs_.run_bytes - within_run_);
      std::byte* to = tensor_ + runs_.RunOffset(run_) + within_run_;
      non_temporal_ ? CopyNonTemporal(to, data, static_cast<size_t>(step))
                    : static_cast<void>(std::memcpy(to, data, static_cast<size_t>(step)));
      data += step;
      bytes -= step;
      Skip(step);
    }
  }

  // Leaves out `bytes` that are in place already.
  void Skip(int64_t bytes) {
    within_run_ += bytes;
    run_ += within_run_ / runs_.run_bytes;
    within_run_ %= runs_.run_bytes;
  }

 private:
  StridedRuns runs_;
  std::byte* tensor_;
  bool non_temporal_;
  int64_t run_ = 0;
  int64_t within_run_ = 0;
};

}  // namespace attnd
