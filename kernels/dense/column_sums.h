// ColumnSumsKernel: gradients of biases and norms (ColumnSumsDesc): sums over rows of kSumColumns
// columns a block. A block of rows is summed in stretches of kSumStretch, a warp each; one warp
// adds the stretches in order, and the sum of the block to what stands there. Calls cut at blocks
// of rows give the bits of one.
#pragma once

#include "kernels/dense/norm.h"

namespace attnd {

struct ColumnSumsKernel {
  static constexpr int kThreads = kSumThreads, kWarps = kThreads / 32;
  struct Shared {
    float sums[kWarps][kSumColumns], weight_sums[kWarps][kSumColumns];
  };
  static_assert(kSumColumns == 32);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const ColumnSumsDesc& d = *static_cast<const ColumnSumsDesc*>(params.dense);
    const int warp = at.thread >> 5, lane = at.thread & 31;
    const int column = at.block * kSumColumns + lane;
    for (int64_t begin = 0; begin < d.rows; begin += d.block_rows) {
      const int64_t end = d.rows - begin < d.block_rows ? d.rows : begin + d.block_rows;
      const Sums block = SumBlock({d, begin, end, column, warp, lane}, shared);
      if (warp != 0 || column >= d.columns) continue;
      if (d.sums != nullptr) Add(d.sums + column, block.sum);
      if (d.weight_sums != nullptr) Add(d.weight_sums + column, block.weight_sum);
    }
  }

 private:
  struct Sums {
    float sum = 0, weight_sum = 0;
  };
  struct Place {
    const ColumnSumsDesc& desc;
    int64_t begin, end;  // rows
    int column, warp, lane;
  };

  // Of warp 0 alone.
  ATTN_HD static Sums SumBlock(const Place& p, Shared& shared) {
    Sums block;
    for (int64_t group = p.begin; group < p.end; group += kWarps * kSumStretch) {
      const int64_t first = group + p.warp * kSumStretch;
      const Sums own = p.column < p.desc.columns ? SumStretch(p, first) : Sums();
      ptx::StoreSharedFloat(&shared.sums[p.warp][p.lane], own.sum);
      ptx::StoreSharedFloat(&shared.weight_sums[p.warp][p.lane], own.weight_sum);
      ptx::SyncThreads();
      if (p.warp == 0) {
        for (int n = 0; n < kWarps && group + n * kSumStretch < p.end; ++n) {
          block.sum = ptx::Add(block.sum, ptx::LoadSharedFloat(&shared.sums[n][p.lane]));
          block.weight_sum =
              ptx::Add(block.weight_sum, ptx::LoadSharedFloat(&shared.weight_sums[n][p.lane]));
        }
      }
      ptx::SyncThreads();
    }
    return block;
  }

  ATTN_HD static Sums SumStretch(const Place& p, int64_t first) {
    const ColumnSumsDesc& d = p.desc;
    const int64_t end = p.end - first < kSumStretch ? p.end : first + kSumStretch;
    Sums sums;
    for (int64_t row = first; row < end; ++row) {
      const int64_t index = row * d.columns + p.column;
      const float number = RoundTo(d.operand, LoadNumber(d.in, index));
      sums.sum = ptx::Add(sums.sum, number);
      if (d.weight_sums == nullptr) continue;
      const DenseStatistics s = {ptx::LoadGlobalFloat(&d.statistics[row].mean),
                                 ptx::LoadGlobalFloat(&d.statistics[row].rstd)};
      const float n = RoundTo(d.round_element, Normalised(s, LoadNumber(d.x, index)));
      sums.weight_sum = ptx::Fma(number, n, sums.weight_sum);
    }
    return sums;
  }

  ATTN_HD static void Add(float* to, float sum) {
    ptx::StoreGlobalFloat(to, ptx::Add(ptx::LoadGlobalFloat(to), sum));
  }
};

}  // namespace attnd
