// wgmma as the kernels of this folder use it. Accumulators are those of m16n8k16
// (sm80/tile_math.h), a warp's 16 rows of its warpgroup's 64, so rules on scores are shared with
// sm80. Tiles in shared memory stand in panels: 64 columns of all rows, a row 128 bytes whose
// 16-byte chunks are twisted by the row, as boxes with a 128-byte swizzle come. (PTX ISA 8.8,
// "Asynchronous Warpgroup Level Matrix Shared Memory Layout")
#pragma once

#include "kernels/ptx/instructions_sm90.h"
#include "kernels/sm80/tile_math.h"

namespace attnd::sm90 {

using sm80::Accumulator;
using sm80::At;
using sm80::kUnitColumns;
using sm80::kWarpLanes;

inline constexpr int kGroupThreads = 128, kGroupRows = 64;  // of a warpgroup
inline constexpr int kPanelColumns = 64, kRowBytes = 2 * kPanelColumns;
inline constexpr int kDepth = 16;  // of a product

struct HalfMath : sm80::HalfMath {
  static constexpr int32_t kElement = kBiasFloat16;
  template <int kGroups>
  ATTN_HD static void Rows(float (&c)[kGroups][4], uint64_t a, uint64_t b, bool adds) {
    ptx::WarpgroupHalf(c, a, b, adds);
  }
  template <int kGroups>
  ATTN_HD static void Columns(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
    ptx::WarpgroupHalf(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void FirstRows(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupHalfFirst(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void AddRows(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupHalfNext(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void FirstAcross(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupHalfAcrossFirst(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void Across(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupHalfAcross(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void AcrossB(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupHalfAcrossB(c, a, b);
  }
};
struct BFloat16Math : sm80::BFloat16Math {
  static constexpr int32_t kElement = kBiasBFloat16;
  template <int kGroups>
  ATTN_HD static void Rows(float (&c)[kGroups][4], uint64_t a, uint64_t b, bool adds) {
    ptx::WarpgroupBFloat16(c, a, b, adds);
  }
  template <int kGroups>
  ATTN_HD static void Columns(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b) {
    ptx::WarpgroupBFloat16(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void FirstRows(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupBFloat16First(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void AddRows(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupBFloat16Next(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void FirstAcross(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupBFloat16AcrossFirst(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void Across(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupBFloat16Across(c, a, b);
  }
  template <int kGroups>
  ATTN_HD static void AcrossB(float (&c)[kGroups][4], uint64_t a, uint64_t b) {
    ptx::WarpgroupBFloat16AcrossB(c, a, b);
  }
};

constexpr int PanelBytes(int rows) { return rows * kRowBytes; }
// Byte offset of a chunk in a tile of kRows rows.
template <int kRows>
ATTN_HD constexpr int PanelOffset(int row, int chunk) {
  return (chunk >> 3) * PanelBytes(kRows) + row * kRowBytes + ((chunk & 7) ^ (row & 7)) * 16;
}

// RowsOut says where a warp's rows go: those that exist, and whole chunks of them.
struct RowsOut {
  char* first;
  int64_t row_bytes;
  int rows, chunks;
};
// A warp's rows of accumulators to memory, in whole lines, through room of its own in shared memory
// for that many rows. pack(low, high): two neighbours as a word.
inline constexpr int kStoredRows = 16;
template <int kHeadDim, class Pack>
ATTN_HD void StoreRows(const float (&sums)[kHeadDim / 8][4], const Pack& pack, int lane, char* room,
                       const RowsOut& out) {
  constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kWarpLanes / kChunks;
  ptx::SyncWarp();
#pragma unroll
  for (int c = 0; c < kChunks; c += 2) {
    ptx::StoreMatrices(
        room + PanelOffset<kStoredRows>(lane & 15, c + (lane >> 4)),
        make_uint4(pack(sums[c][0], sums[c][1]), pack(sums[c][2], sums[c][3]),
                   pack(sums[c + 1][0], sums[c + 1][1]), pack(sums[c + 1][2], sums[c + 1][3])));
  }
  ptx::SyncWarp();
  const int chunk = lane % kChunks, row = lane / kChunks;
  const int left = chunk < out.chunks ? out.rows - row : 0;
  char* const to = out.first + row * out.row_bytes + chunk * 16;
#pragma unroll
  for (int n = 0; n < kStoredRows; n += kRowsAtOnce) {
    const uint4 words = ptx::LoadShared128(room + PanelOffset<kStoredRows>(n + row, chunk));
    if (n < left) ptx::StoreGlobal128(to + n * out.row_bytes, words);
  }
}

// The same as float32, straight from the accumulators: what floats(low, high) makes of two.
template <int kHeadDim, class Floats>
ATTN_HD void StoreFloatRows(const float (&sums)[kHeadDim / 8][4], int lane, const RowsOut& out,
                            const Floats& floats) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = Accumulator::Row(2 * r, lane);
    if (row >= out.rows) continue;
    char* const to = out.first + row * out.row_bytes + (lane & 3) * 8;
#pragma unroll
    for (int c = 0; c < kHeadDim / 8; ++c) {
      if (c < out.chunks)
        ptx::StoreGlobal64(to + c * 32, floats(sums[c][2 * r], sums[c][2 * r + 1]));
    }
  }
}

// c = A·Bᵀ of two tiles in shared memory with columns of kHeadDim: 64 rows of one of kRowsOfA rows,
// all kGroups·8 of the other.
template <class Math, int kHeadDim, int kRowsOfA, int kGroups>
ATTN_HD void MultiplyRows(const void* a, const void* b, float (&c)[kGroups][4]) {
  const uint64_t of_a = ptx::MatrixOf(a, 16, 8 * kRowBytes);
  const uint64_t of_b = ptx::MatrixOf(b, 16, 8 * kRowBytes);
#pragma unroll
  for (int i = 0; i < kHeadDim / kDepth; ++i) {
    const int panel = i / (kPanelColumns / kDepth), bytes = i % (kPanelColumns / kDepth) * 32;
    Math::Rows(c, of_a + ((panel * PanelBytes(kRowsOfA) + bytes) >> 4),
               of_b + ((panel * PanelBytes(kGroups * 8) + bytes) >> 4), i > 0);
  }
}
// The same, where c's old values are in nobody's way.
template <class Math, int kHeadDim, int kRowsOfA, int kGroups>
ATTN_HD void MakeRows(const void* a, const void* b, float (&c)[kGroups][4]) {
  const uint64_t of_a = ptx::MatrixOf(a, 16, 8 * kRowBytes);
  const uint64_t of_b = ptx::MatrixOf(b, 16, 8 * kRowBytes);
  Math::FirstRows(c, of_a, of_b);
#pragma unroll
  for (int i = 1; i < kHeadDim / kDepth; ++i) {
    const int panel = i / (kPanelColumns / kDepth), bytes = i % (kPanelColumns / kDepth) * 32;
    Math::AddRows(c, ptx::MovedMatrix(of_a, panel * PanelBytes(kRowsOfA) + bytes),
                  ptx::MovedMatrix(of_b, panel * PanelBytes(kGroups * 8) + bytes));
  }
}
// c = Aᵀ·B of two tiles of kRows rows: 64 columns of A, kGroups·8 of B inside one panel.
template <class Math, int kRows, int kGroups>
ATTN_HD void MakeAcross(const void* a, const void* b, float (&c)[kGroups][4]) {
  const uint64_t of_a = ptx::MatrixOf(a, PanelBytes(kRows), 8 * kRowBytes);
  const uint64_t of_b = ptx::MatrixOf(b, PanelBytes(kRows), 8 * kRowBytes);
  Math::FirstAcross(c, of_a, of_b);
#pragma unroll
  for (int i = 1; i < kRows / kDepth; ++i) {
    Math::Across(c, ptx::MovedMatrix(of_a, i * PanelBytes(kDepth)),
                 ptx::MovedMatrix(of_b, i * PanelBytes(kDepth)));
  }
}
// c += P·B: P's rows in registers (pairs of columns), B a tile of kDepths·16 rows and kGroups·8
// columns.
template <class Math, int kDepths, int kGroups>
ATTN_HD void AddColumns(const uint32_t (&p)[kDepths * 2][2], const void* b,
                        float (&c)[kGroups][4]) {
  const uint64_t of_b = ptx::MatrixOf(b, PanelBytes(kDepths * kDepth), 8 * kRowBytes);
#pragma unroll
  for (int i = 0; i < kDepths; ++i) {
    const uint32_t a[4] = {p[2 * i][0], p[2 * i][1], p[2 * i + 1][0], p[2 * i + 1][1]};
    Math::Columns(c, a, of_b + ((i * PanelBytes(kDepth)) >> 4));
  }
}

// The same with descriptors that move in one addition.
template <class Math, int kDepths, int kGroups>
ATTN_HD void AddPairs(const uint32_t (&p)[kDepths * 2][2], const void* b, float (&c)[kGroups][4]) {
  const uint64_t of_b = ptx::MatrixOf(b, PanelBytes(kDepths * kDepth), 8 * kRowBytes);
#pragma unroll
  for (int i = 0; i < kDepths; ++i) {
    const uint32_t a[4] = {p[2 * i][0], p[2 * i][1], p[2 * i + 1][0], p[2 * i + 1][1]};
    Math::Columns(c, a, ptx::MovedMatrix(of_b, i * PanelBytes(kDepth)));
  }
}

}  // namespace attnd::sm90
