// Descriptors of sm_70's kernels of layers of many rows, at LaunchParams.dense: several gradients
// of weights in one launch, and a norm's gradient with the sums of its parameters. The host fills
// them.
// Errors: none.
#pragma once

#include "kernels/dense/dense_params.h"
#include "kernels/dense/product_params.h"

namespace attnd {

// Gradients of weights have here, in place of a bias, float32 [rows] or null: the sums of A's
// columns are added to them, of each kProductBlockDepth of the depth as ColumnSumsKernel adds those
// of a block of rows.
ATTN_HD float* ColumnSumsOf(const ProductDesc& p) {
  if (p.result != kProductAddBlocks) return nullptr;
  return static_cast<float*>(const_cast<void*>(p.bias));
}

// The ProductDescs of a launch's gradients follow. Product n has the blocks before ends[n] and from
// ends[n - 1] on; places behind the last one have kNoBlock.
struct ListedGradients {
  static constexpr int32_t kMost = 64, kNoBlock = 0x7fffffff;
  int32_t ends[kMost];
};

// A norm's gradient of float16 vectors of at most kNormSumsColumns, without a chain before, that
// also leaves, for each kSumStretch vectors, two times float32 [count]: what ColumnSumsDesc's
// `sums` add up, and `weight_sums`.
struct NormSumsDesc {
  NormDesc norm;
  float *sums, *weight_sums;  // [stretches, count]
};
inline constexpr int32_t kNormSumsColumns = 768, kNormSumsMinColumns = 129;

// gradient += the sums of stretches, of kStretchesOfBlock first, then of those blocks, in order.
struct StretchSumsDesc {
  const float *sums, *weight_sums;  // NormSumsDesc's
  float *to, *to_weight;            // [count]
  int32_t stretches, count;
};
inline constexpr int32_t kStretchesOfBlock = 32, kMostStretchBlocks = 128;

}  // namespace attnd
