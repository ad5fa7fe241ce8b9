// mma.m16n8k16 as the kernels of this folder use it: a warp makes units of 16 rows × 32 columns of
// scores, of which a lane holds sixteen, exactly those of one dropout generator call
// (attention/dropout.h). Tiles in shared memory stand in rows of whole 128-byte lines whose 16-byte
// chunks are twisted by the row, so that ldmatrix meets no bank twice. (PTX ISA 8.8, "Matrix
// Fragments for mma.m16n8k16"); lane_map_test is the proof.
#pragma once

#include "kernels/ptx/instructions_sm80.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/tile_math.h"

namespace attnd::sm80 {

inline constexpr int kWarpLanes = 32;
inline constexpr int kUnitRows = 16, kUnitColumns = 32;

// A float32 accumulator of a unit is [4 groups of 8 columns][4]. Element e of group t.
struct Accumulator {
  static constexpr int kRows = 2, kColumns = 2;
  ATTN_HD static constexpr int Element(int r, int c) { return 2 * r + c; }
  ATTN_HD static constexpr int Row(int e, int lane) { return (lane >> 2) + 8 * (e >> 1); }
  ATTN_HD static constexpr int Col(int e, int lane) { return (lane & 3) * 2 + (e & 1); }
  // Reduces over the four lanes that share a row.
  ATTN_HD static float RowMax(float x) {
    x = ptx::Max(x, ptx::ShuffleXor(x, 1));
    return ptx::Max(x, ptx::ShuffleXor(x, 2));
  }
  ATTN_HD static float RowSum(float x) {
    x += ptx::ShuffleXor(x, 1);
    return x + ptx::ShuffleXor(x, 2);
  }
};
static_assert(TileMath<Accumulator>);

ATTN_HD void ToWords(uint4 v, uint32_t (&words)[4]) {
  words[0] = v.x;
  words[1] = v.y;
  words[2] = v.z;
  words[3] = v.w;
}

// Two groups of eight columns at once (float32: float_math.h).
template <class Math>
struct HalfOperands {
  static constexpr int kOperandWords = 4;
  static constexpr int kPairWords = 2;  // of a lane's probabilities of eight keys: [row]
  ATTN_HD static void ToOperand(uint4 v, uint32_t (&words)[kOperandWords]) { ToWords(v, words); }
  template <int kTiles, int kGroups>
  ATTN_HD static void Multiply(float (&sums)[kTiles][kGroups][4], int group,
                               const uint32_t (&a)[kTiles][kOperandWords], uint4 b) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      Math::Multiply(sums[m][group], a[m], b.x, b.y);
      Math::Multiply(sums[m][group + 1], a[m], b.z, b.w);
    }
  }
};

// HalfMath defines the operands of a product, and how two scores become a word of one.
struct HalfMath : Float16, HalfOperands<HalfMath> {
  using HalfOperands<HalfMath>::Multiply;
  ATTN_HD static void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::MmaHalf(c, a, b0, b1);
  }
  ATTN_HD static uint32_t Pack(float low, float high) { return ptx::PackHalves(low, high); }
};
struct BFloat16Math : BFloat16, HalfOperands<BFloat16Math> {
  using HalfOperands<BFloat16Math>::Multiply;
  ATTN_HD static void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::MmaBFloat16(c, a, b0, b1);
  }
  ATTN_HD static uint32_t Pack(float low, float high) { return ptx::PackBFloat16(low, high); }
};

// Byte offset of a chunk in a tile of `kPitch` chunks a row, a multiple of 8.
template <int kPitch>
ATTN_HD constexpr int ChunkOffset(int row, int chunk) {
  return (row * kPitch + (chunk ^ (row & 7))) * 16;
}
// A place of ChunkOffset whose chunk is 0 or 1, `row` rows (a multiple of 8) and `chunk` chunks
// (even) on.
template <int kPitch>
ATTN_HD constexpr int Moved(int offset, int row, int chunk) {
  return (offset ^ (chunk & 7) * 16) + (chunk >> 3) * 128 + row * kPitch * 16;
}
// Chunks that rows of `chunks` stand apart.
ATTN_HD constexpr int PitchOf(int chunks) { return (chunks + 7) / 8 * 8; }

// LanePlace says where a lane points for ldmatrix, as row and chunk of a 16×16 block: operand a
// from its rows, and b from the rows of its transpose (K of scores) or, transposed on the way, from
// its own (V of O).
struct LanePlace {
  int row, chunk;
  ATTN_HD static constexpr LanePlace OfA(int lane) { return {lane & 15, lane >> 4}; }
  ATTN_HD static constexpr LanePlace OfColumns(int lane) {
    return {(lane & 7) | (lane >> 4) << 3, lane >> 3 & 1};
  }
  ATTN_HD static constexpr LanePlace OfRows(int lane) { return {lane & 15, lane >> 4}; }
};

ATTN_HD char* At(void* base, int offset) { return static_cast<char*>(base) + offset; }
ATTN_HD const char* At(const void* base, int offset) {
  return static_cast<const char*>(base) + offset;
}

}  // namespace attnd::sm80
