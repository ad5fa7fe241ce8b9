// Workers: the threads of the CPU engine of modules, each with scratch for dense products. A loop's
// caller works too; loops of several instances take turns. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/cpu/dense/dense_product.h"
#include "kernels/cpu/dense/pointwise.h"

namespace attnd {

class Workers {
 public:
  explicit Workers(int threads)
      : pool_(threads, ThreadPool::Priority::kBackground),
        scratch_(threads * kDenseScratchFloats) {}

  void Run(DenseProduct product) {
    product.item_rows = DenseItemRows(product, pool_.threads());
    pool_.ParallelFor(DenseItems(product), [&](int64_t item, int thread) {
      RunDenseItem(product, item, &scratch_[thread * kDenseScratchFloats]);
    });
  }

  // body(range) for ranges of `step` indices that together are [0, count).
  void ForRanges(int64_t count, int64_t step, const std::function<void(IndexRange)>& body) {
    pool_.ParallelFor((count + step - 1) / step, [&](int64_t item, int) {
      body({item * step, std::min(step, count - item * step)});
    });
  }
  // Ranges of about kRangeNumbers numbers of `columns` each.
  void ForRows(int64_t rows, int64_t columns, const std::function<void(IndexRange)>& body) {
    ForRanges(rows, std::max<int64_t>(1, kRangeNumbers / std::max<int64_t>(columns, 1)), body);
  }
  void ForNumbers(int64_t count, const std::function<void(IndexRange)>& body) {
    ForRanges(count, kRangeNumbers, body);
  }

 private:
  static constexpr int64_t kRangeNumbers = 16384;

  ThreadPool pool_;
  std::vector<float> scratch_;
};

}  // namespace attnd
