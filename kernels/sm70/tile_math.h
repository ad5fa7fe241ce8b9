// m8n8k4 is four 8×8 products at once, one per quad-pair. They stand 2×2, so a warp makes 16×16
// scores: lane bit 3 picks the row half, bit 2 the column half, bit 4 the upper half of a
// quad-pair. (PTX ISA, m8n8k4)
//
// Numbering: within its tile a row or column gets a number such that each lane owns exactly the 16
// scores of one dropout generator call (attention/dropout.h) of a 16-row × 32-key tile, and such
// that a plain swizzle keeps all operand loads free of bank conflicts. It is a permutation of the
// hardware's order; loads of operands ask Row and Key below.
// lane_map_test is the proof, not this comment.
#pragma once

#include "kernels/ptx/instructions.h"
#include "kernels/ptx/mma_sm70.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/tile_math.h"

namespace attnd::sm70 {

inline constexpr int kWarpLanes = 32;

// A lane's place in its warp.
struct Lane {
  int index;
  ATTN_HD constexpr int quad() const { return index & 3; }
  ATTN_HD constexpr int column_half() const { return (index >> 2) & 1; }
  ATTN_HD constexpr int row_half() const { return (index >> 3) & 1; }
  ATTN_HD constexpr int upper() const { return (index >> 4) & 1; }

  // Operand A by rows: the row of a 16-row tile whose four k values this lane holds.
  ATTN_HD constexpr int OperandRow() const {
    return (index & 1) | upper() << 1 | row_half() << 2 | (index & 2) << 2;
  }
  // Operand B by columns: the key of a 16-key group whose four k values this lane holds.
  ATTN_HD constexpr int OperandKey() const { return quad() | column_half() << 2 | upper() << 3; }
  // Operand B by rows, k = key: the key whose columns this lane holds in k step `step` (0, 1), in
  // its own column half's keys (other = 0) or the other's (1).
  ATTN_HD constexpr int ValueKey(int step, int other) const {
    return (index & 1) | step << 1 | (column_half() ^ other) << 2 | (index & 2) << 2;
  }
};

// Tiles in shared memory: rows of kChunks 16-byte chunks, chunk c of row r at place c ^ Twist(r)
// within its row. Byte offsets; since a row is whole 128-byte lines and tiles are aligned to them,
// offset ^ 16·n moves n chunks (n < 8) within the line, whatever was added before.
ATTN_HD constexpr int Twist(int row) { return (row & 7) ^ ((row >> 2) & 2); }
ATTN_HD constexpr int ChunkOffset(int row, int chunk, int chunks) {
  return (row * chunks + (chunk ^ Twist(row))) * 16;
}

// float32 accumulators: two rows on a lane, four keys of each.
struct Float32Accumulate {
  using Accumulator = float[8];
  using Operand = Float16;
  static constexpr bool kSplits = false;  // operands: split_float.h
  static constexpr int kRows = 2, kColumns = 4;
  ATTN_HD static constexpr int Element(int r, int c) { return (c & 1) + 2 * r + 4 * (c >> 1); }
  ATTN_HD static constexpr int Row(int e, int lane) {
    return (lane & 1) | (lane >> 4) << 1 | ((lane >> 3) & 1) << 2 | ((e >> 1) & 1) << 3;
  }
  ATTN_HD static constexpr int Col(int e, int lane) {
    return (e & 1) | (lane & 2) | ((lane >> 2) & 1) << 2 | (e >> 2) << 3;
  }
  // Reduces over the four lanes that share a row.
  ATTN_HD static float RowMax(float x) {
    x = ptx::Max(x, ptx::ShuffleXor(x, 2));
    return ptx::Max(x, ptx::ShuffleXor(x, 4));
  }
  ATTN_HD static float RowSum(float x) {
    x += ptx::ShuffleXor(x, 2);
    return x + ptx::ShuffleXor(x, 4);
  }
  // A lane's word of a mask's bitmap: a bit for each element of four tiles (MaskWord).
  struct MaskWords {
    uint32_t word;
    ATTN_HD static MaskWords All() { return {~0u}; }
    ATTN_HD void Load(const uint32_t* square, int lane) {
      word = ptx::LoadConstant32(square + lane);
    }
    ATTN_HD uint32_t bits() const { return word; }
  };
  ATTN_HD static void Zero(Accumulator& c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) c[e] = 0;
  }
  ATTN_HD static void Multiply(Accumulator& c, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    ptx::MmaRowCol(c, a0, a1, b0, b1);
  }
  ATTN_HD static void ToScores(const Accumulator& c, float (&scores)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) scores[e] = c[e];
  }
};

// float16 accumulators: one row on a lane, eight keys of it. Half the registers; |Q·K| must stay
// below 65504.
struct Float16Accumulate {
  using Accumulator = uint32_t[4];
  using Operand = Float16;
  static constexpr bool kSplits = false;
  static constexpr int kRows = 1, kColumns = 8;
  ATTN_HD static constexpr int Element(int, int c) { return c; }
  ATTN_HD static constexpr int Row(int, int lane) { return Lane{lane}.OperandRow(); }
  ATTN_HD static constexpr int Col(int e, int lane) {
    return (e & 3) | ((lane >> 2) & 1) << 2 | (e >> 2) << 3;
  }
  // Reduces over the two lanes that share a row.
  ATTN_HD static float RowMax(float x) { return ptx::Max(x, ptx::ShuffleXor(x, 4)); }
  ATTN_HD static float RowSum(float x) { return x + ptx::ShuffleXor(x, 4); }
  // Bitmaps lie as float32 accumulators do: of eight keys two lanes have four each.
  struct MaskWords {
    uint32_t low, high;
    int shift;
    ATTN_HD static MaskWords All() { return {~0u, ~0u, 0}; }
    ATTN_HD void Load(const uint32_t* square, int lane) {
      low = ptx::LoadConstant32(square + (lane & ~2));
      high = ptx::LoadConstant32(square + (lane | 2));
      shift = lane & 2;
    }
    ATTN_HD uint32_t bits() const {
      return (low >> shift & 0x33333333u) | (high >> shift & 0x33333333u) << 2;
    }
  };
  ATTN_HD static void Zero(Accumulator& c) {
#pragma unroll
    for (int n = 0; n < 4; ++n) c[n] = 0;
  }
  ATTN_HD static void Multiply(Accumulator& c, uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    ptx::MmaRowColHalf(c, a0, a1, b0, b1);
  }
  // Softmax runs in float32: skipping this conversion costs 0.1 of absolute error.
  ATTN_HD static void ToScores(const Accumulator& c, float (&scores)[8]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scores[2 * n] = ptx::LowHalf(c[n]);
      scores[2 * n + 1] = ptx::HighHalf(c[n]);
    }
  }
};

static_assert(TileMath<Float32Accumulate> && TileMath<Float16Accumulate>);
// A warp's 16×16 scores are eight a lane, however they lie.
static_assert(Float32Accumulate::kRows * Float32Accumulate::kColumns == 8);
static_assert(Float16Accumulate::kRows * Float16Accumulate::kColumns == 8);

}  // namespace attnd::sm70
