// The small kernels around this folder's backward (rules/backward_passes.h), and where it leaves
// dQ's sums for them. Errors: none.
#pragma once

#include "kernels/rules/query_gradient.h"
#include "kernels/sm80/tile_math.h"

namespace attnd::sm80 {

// 64 queries × head_dim over eight warps: two groups of 32 queries by four of columns, or four by
// two where a quarter of the columns is no multiple of 16. A lane has kQueryTiles × kColumnTiles
// accumulators of 16 × 8, in the order of registers.
template <int kHeadDim>
struct DqLayout {
  static constexpr int kColumns = PaddedColumns(kHeadDim);
  static constexpr int kColumnGroups = kHeadDim % 64 == 0 ? 4 : 2;
  static constexpr int kWarpColumns = kHeadDim / kColumnGroups;
  static constexpr int kWarpQueries = 8 * kColumnGroups;
  static constexpr int kQueryTiles = kWarpQueries / 16, kColumnTiles = kWarpColumns / 8;
  static_assert(kColumnTiles % 2 == 0);
  static constexpr int kParts = 1, kOut = kHeadDim;
  static constexpr int kSums = 4 * kQueryTiles * kColumnTiles;
  static constexpr int kFloats = 8 * kSums * kWarpLanes;
  static constexpr int kBlockFloats = kDqBlockRows * kColumns;
  static_assert(kFloats == kDqBlockRows * kHeadDim);

  ATTN_HD static constexpr int FirstQuery(int warp) { return warp / kColumnGroups * kWarpQueries; }
  ATTN_HD static constexpr int FirstColumn(int warp) { return warp % kColumnGroups * kWarpColumns; }
  ATTN_HD static constexpr int Query(int n, int warp, int lane) {
    return FirstQuery(warp) + n / (4 * kColumnTiles) * 16 + Accumulator::Row(n & 3, lane);
  }
  ATTN_HD static constexpr int Column(int n, int warp, int lane) {
    return FirstColumn(warp) + n / 4 % kColumnTiles * 8 + Accumulator::Col(n & 3, lane);
  }
};

template <class Math>
using KeyBoundsKernel = attnd::KeyBoundsKernel<Math>;
template <class Math>
using DeltaKernel = attnd::DeltaKernel<Math, RoundedP>;
template <class Math, int kHeadDim, class DqSums>
using DqKernel = attnd::DqKernel<DqLayout<kHeadDim>, Math, RoundedP, DqSums>;

}  // namespace attnd::sm80
