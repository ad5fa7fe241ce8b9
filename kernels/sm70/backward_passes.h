// The small kernels around Volta's backward (rules/backward_passes.h), and where it leaves dQ's
// sums for them. Errors: none.
#pragma once

#include "kernels/rules/query_gradient.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

// DqLayout says where dQ's sums lie: 64 queries × head_dim in parts of at most 128 columns, each
// cut over eight warps, register by register.
template <int kHeadDim>
struct DqLayout {
  static constexpr int kColumns = kHeadDim;
  static constexpr int kOut = kHeadDim < 128 ? kHeadDim : 128;  // columns of a part
  static constexpr int kParts = kHeadDim / kOut;
  static constexpr int kWarps = 8;
  static constexpr int kSums = kOut / 4;               // on a lane
  static constexpr int kFloats = kWarps * kSums * 32;  // of a part
  static constexpr int kBlockFloats = kFloats * kParts;
  // Query (0..63) and column of sum n: sets of 8 accumulators; for wide heads an LDS.128 of K feeds
  // two sets side by side, for narrow ones an LDS.64 feeds one.
  static constexpr bool kWide = kHeadDim >= 128;
  ATTN_HD static constexpr int Set(int n) { return kWide ? n >> 4 & 1 : n >> 3; }
  ATTN_HD static int Query(int n, int warp, int lane_index) {
    const Lane lane = {lane_index};
    const int set = Set(n);
    return (warp >> 2) * 32 + lane.upper() * 16 + set * 8 + lane.row_half() * 4 + (lane.index & 1) +
           (n & 2);
  }
  ATTN_HD static int Column(int n, int warp, int lane_index) {
    const Lane lane = {lane_index};
    const int in_quad = (lane.index & 2) + (n & 1);
    if (!kWide) return Chunk(warp, lane) * 8 + (n & 4) + in_quad;
    return (Chunk(warp, lane) + (n >> 2 & 1)) * 8 + (n >> 3 & 1) * 4 + in_quad;
  }
  // The place of a row's factor among those of 32: a lane's four rows lie side by side.
  ATTN_HD static constexpr int FactorAt(int row) {
    return (row & 16) | (row & 4) << 1 | (row & 1) << 2 | (row & 8) >> 2 | (row & 2) >> 1;
  }
  // First chunk of K that this lane's column half multiplies; bit 2 by the half, so that loads do
  // not conflict.
  ATTN_HD static int Chunk(int warp, Lane lane) {
    const int group = warp & 3;
    if (!kWide) return lane.column_half() * 4 + group;
    return lane.column_half() * 4 + (group & 1) * 2 + (group >> 1) * 8;
  }
};

using KeyBoundsKernel = attnd::KeyBoundsKernel<Float16>;
using DeltaKernel = attnd::DeltaKernel<Float16, TruncatedP>;
template <int kHeadDim, class DqSums>
using DqKernel = attnd::DqKernel<DqLayout<PaddedColumns(kHeadDim)>, Float16, TruncatedP, DqSums>;

}  // namespace attnd::sm70
