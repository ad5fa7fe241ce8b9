// SumGroup: sums of columns that wait for each other and become one launch. Each adds to gradients
// of its own, so any order gives the same bits. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/dense/dense_params.h"
#include "kernels/layers/cuda/launch_queue.h"
#include "kernels/layers/cuda/touched_bytes.h"

namespace attnd {

// The bytes of what is summed, of x and of statistics; of both sums.
std::array<ByteRange, 3> ReadBy(const ColumnSumsDesc& sums);
std::array<ByteRange, 2> WrittenBy(const ColumnSumsDesc& sums);

class SumGroup {
 public:
  // Whether these sums, without turns and carries, may join those that wait: none of them adds to
  // the same numbers, and there is room for all, with turns and carries.
  bool Takes(const ColumnSumsDesc& sums) const;
  // After Takes.
  void Add(const ColumnSumsDesc& sums, double flops);
  // Whether some of these bytes are read or added to.
  bool Touches(const ByteRange& range) const { return touched_.AreTouched(range); }
  bool Writes(const ByteRange& range) const { return touched_.AreWritten(range); }

  bool empty() const { return sums_.empty(); }
  double flops() const { return flops_; }
  // Those that wait, with their turns and carries in these places; none do afterwards.
  std::vector<ColumnSumsDesc> Take(int32_t* turns, float* carries);

 private:
  std::vector<ColumnSumsDesc> sums_;
  TouchedBytes touched_;
  double flops_ = 0;
  int64_t turns_ = 0, carries_ = 0;
};

}  // namespace attnd
