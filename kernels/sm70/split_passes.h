// The small kernels around float32's backward (split_backward.h), and where it leaves dQ's sums for
// them. Errors: none.
#pragma once

#include "kernels/rules/query_gradient.h"
#include "kernels/sm70/split_float.h"

namespace attnd::sm70 {

// 64 queries × head_dim in two parts of half of the columns, each cut over eight warps: pairs of
// 16 queries. A chunk of four columns is both column halves' in turn.
template <int kHeadDim>
struct SplitDqLayout {
  static constexpr int kColumns = kHeadDim;
  static constexpr int kParts = 2, kOut = kHeadDim / kParts;
  static constexpr int kSums = kOut / 4;
  static constexpr int kFloats = 8 * kSums * kWarpLanes;
  static constexpr int kBlockFloats = kFloats * kParts;
  static_assert(kBlockFloats == kDqBlockRows * kHeadDim);

  ATTN_HD static int Query(int n, int warp, int lane_index) {
    const Lane lane = {lane_index};
    return (warp >> 1) * 16 + (lane.row_half() * 2 + lane.upper()) * 4 + (lane.index & 1) + (n & 2);
  }
  ATTN_HD static int Column(int n, int warp, int lane_index) {
    const Lane lane = {lane_index};
    const int pair = kSums == 8 ? (warp & 1) * 2 : (warp & 1) * 8 + (n >> 3) * 2;
    const int chunk = lane.column_half() * 4 + (n >> 2 & 1) + pair;
    return chunk * 4 + (lane.index & 2) + (n & 1);
  }
};

template <int kHeadDim>
using SplitDqKernel =
    attnd::DqKernel<SplitDqLayout<kHeadDim>, SplitFloat32, SplitP, FixedPointSums>;

}  // namespace attnd::sm70
