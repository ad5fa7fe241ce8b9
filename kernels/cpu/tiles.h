// Tiles of the CPU engine and the memory around them. Sizes follow from the head dimensions alone,
// so that a row's arithmetic never depends on threads, batch or the launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/problem.h"
#include "base/round_up.h"

namespace attnd {

// The widest vector of any target and the widest panel of B (gemm-inl.h), in floats: buffers are
// padded to these whatever the target.
inline constexpr int kMaxLanes = 16;
inline constexpr int kMaxPanelColumns = 64;

constexpr int64_t PaddedDim(int64_t dim) { return RoundUp(dim, kMaxLanes); }

// A half-open range of rows or columns of a tile.
struct Span {
  int begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

// q_rows and kv_rows are multiples of 16 and 32, so that dropout blocks start with the tile, and
// kv_rows of kMaxPanelColumns.
struct CpuTile {
  int q_rows, kv_rows;
};
// Masks are skipped by so many keys: half of the widest panel, a block of matrix tiles.
inline constexpr int kSkipKeys = 32;
inline constexpr int kMaxQueryRows = 128;
inline constexpr int kMaxKeyRows = 256;

// A forward item: up to this many tiles of kMaxQueryRows queries that share a KV head. Each tile of
// kMaxKeyRows keys is packed and comes from memory once for all of them: K, V and S of it, 384 KiB
// with head_dim 128, stay in a second-level cache while Q and O pass by. Four tiles packed K four
// times as often, which cost 2 % at 2048 keys.
inline constexpr int kMaxTilesPerItem = 16;
inline int MaxTilesPerItem(const Problem& p) {
  const int64_t dim = std::max(p.qk_head_dim, p.v_head_dim);
  return dim <= 64 ? kMaxTilesPerItem : dim <= 128 ? 8 : 4;
}
constexpr int64_t QueryTiles(int64_t q_len) { return (q_len + kMaxQueryRows - 1) / kMaxQueryRows; }

// Backward keeps five float matrices of kv_rows rows: at most 64·256 or 128·128 floats each, so
// that they fit a 1 MiB second-level cache.
constexpr CpuTile BackwardTileSize(const Problem& p) {
  int64_t dim = std::max(p.qk_head_dim, p.v_head_dim);
  return {.q_rows = 64, .kv_rows = dim <= 64 ? 256 : dim <= 128 ? 128 : 64};
}

// With few queries packing K costs more than it saves: forward multiplies K where it lies by Qᵀ,
// one vector of kFewQueries wide. It pays if the unused lanes of all heads of the group make no
// more than one vector. The sums and their order are the same either way.
inline constexpr int64_t kFewQueries = kMaxLanes;
inline bool HasFewQueries(const Problem& p, int64_t q_len) {
  return q_len <= kFewQueries && p.group_size() * (kFewQueries - q_len) <= kFewQueries;
}

// Backward divides the rows that share a KV head into this many parts, which run in parallel and
// add up dK and dV in their order: one per 512 rows, at most 4.
constexpr int64_t kRowsPerSlot = 512;
constexpr int64_t kMaxSlots = 4;
inline int64_t GradientSlots(const Problem& p, int64_t q_len) {
  return std::clamp<int64_t>(p.group_size() * q_len / kRowsPerSlot, 1, kMaxSlots);
}

// A thread's scratch, in floats: no smaller than what any item lays out in it (checked there).
inline constexpr int64_t kScratchFloats = 432 * 1024;

}  // namespace attnd
