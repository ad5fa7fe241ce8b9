// ProductGroup: products in wide tiles that wait for each other and become one launch: at the end
// of each launch of its own many multiprocessors would be idle. Any order gives the same bits.
// Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/dense/dense_params.h"
#include "kernels/layers/cuda/launch_queue.h"
#include "kernels/layers/cuda/touched_bytes.h"

namespace attnd {

// The bytes of C, and of the values of its curve.
std::array<ByteRange, 2> WrittenBy(const ProductDesc& p);

class ProductGroup {
 public:
  struct Waiting {
    PlainProductDesc desc;
    double flops = 0;
  };

  // Whether it may join those that wait: it has their kernel and depth, does not read or write what
  // one of them writes or write what one reads, and all together are no more than a launch takes.
  bool Takes(const LayerKernel& kernel, const Waiting& product) const;
  // After Takes.
  void Add(const LayerKernel& kernel, const Waiting& product);
  // Whether one of them reads or writes some of these bytes.
  bool Touches(const ByteRange& range) const { return touched_.AreTouched(range); }
  bool Writes(const ByteRange& range) const { return touched_.AreWritten(range); }

  bool empty() const { return products_.empty(); }
  const LayerKernel& kernel() const { return kernel_; }
  // Those that wait, in order; none do afterwards.
  std::vector<Waiting> Take();

 private:
  LayerKernel kernel_ = KernelKind::kDenseProduct;
  std::vector<Waiting> products_;
  TouchedBytes touched_;
  double flops_ = 0;
  int64_t tiles_ = 0;
};

}  // namespace attnd
