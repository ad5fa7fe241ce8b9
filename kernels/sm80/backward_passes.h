// The small kernels around this folder's backward (rules/backward_passes.h), and where it leaves
// dQ's sums for them. Errors: none.
#pragma once

#include "kernels/rules/query_gradient_quads.h"
#include "kernels/sm80/float_math.h"
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
  // Sum n is this group's and element's of tile n / (4·kColumnTiles) of queries.
  ATTN_HD static constexpr int Group(int n) { return n / 4 % kColumnTiles; }
  ATTN_HD static constexpr int Element(int n) { return n & 3; }
  ATTN_HD static constexpr int QueryOf(int tile, int r, int warp, int lane) {
    return FirstQuery(warp) + tile * 16 + Accumulator::Row(2 * r, lane);
  }
  ATTN_HD static constexpr int Query(int n, int warp, int lane) {
    return QueryOf(n / (4 * kColumnTiles), Element(n) >> 1, warp, lane);
  }
  ATTN_HD static constexpr int Column(int n, int warp, int lane) {
    return FirstColumn(warp) + n / 4 % kColumnTiles * 8 + Accumulator::Col(n & 3, lane);
  }
};

// The same of float32 (float_math.h): interleaved groups are neighbours, and a lane's four queries
// are those of a chunk of dS.
template <int kHeadDim>
struct FloatDqLayout : DqLayout<kHeadDim> {
  using Half = DqLayout<kHeadDim>;
  using Half::kColumnTiles;
  ATTN_HD static constexpr int Group(int n) { return n % (4 * kColumnTiles) / 8 * 2 + (n & 1); }
  ATTN_HD static constexpr int Element(int n) { return n >> 1 & 3; }
  ATTN_HD static constexpr int QueryOf(int tile, int r, int warp, int lane) {
    return Half::FirstQuery(warp) + (lane >> 3) * 8 + (lane >> 2 & 1) + 2 * (2 * tile + r);
  }
  ATTN_HD static constexpr int Query(int n, int warp, int lane) {
    return QueryOf(n / (4 * kColumnTiles), Element(n) >> 1, warp, lane);
  }
  ATTN_HD static constexpr int Column(int n, int warp, int lane) {
    return Half::FirstColumn(warp) + FloatMath::Column<kColumnTiles>(Group(n), Element(n), lane);
  }
};
template <class Math, int kHeadDim, class DqSums>
struct DqKernelFor {
  using Layout = DqLayout<kHeadDim>;
  using Type = QuadDqKernel<Layout, Math, RoundedP, DqSums, AllAtOnce>;
};
template <int kHeadDim, class DqSums>
struct DqKernelFor<FloatMath, kHeadDim, DqSums> {
  using Layout = FloatDqLayout<kHeadDim>;
  using Type = attnd::DqKernel<Layout, FloatMath, RoundedP, DqSums>;
};
template <class Math, int kHeadDim>
using DqLayoutOf = typename DqKernelFor<Math, kHeadDim, FixedPointSums>::Layout;

template <class Math>
using KeyBoundsKernel = attnd::KeyBoundsKernel<Math>;
template <class Math>
using DeltaKernel = attnd::DeltaKernel<Math, RoundedP>;
template <class Math, int kHeadDim, class DqSums>
using DqKernel = typename DqKernelFor<Math, kHeadDim, DqSums>::Type;

}  // namespace attnd::sm80
