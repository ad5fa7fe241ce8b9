// float32 on mma.m16n8k8 of TF32 numbers, which have eleven bits: x = high + low, both TF32, and
//   a·b = low·high + high·low + high·high
// exact to about 2^-23 of |a|·|b|. The tensor core truncates what it adds up, so it adds up scores,
// or the products of a step, and what many steps add to is added outside.
//
// Words of ldmatrix are four numbers of a row, which is how a lane wants both operands of a product
// of rows. Operand b from rows of its own (V of O) is loaded by numbers instead: k index n of a
// lane is row 2n, n + 4 row 2n + 1, which operand a follows, so that accumulators of scores are
// operands as they stand and no bank is met twice; and groups of columns stand interleaved, so that
// a lane's numbers of a row lie together. Errors: none.
#pragma once

#include "kernels/rules/float_element.h"
#include "kernels/sm80/tile_math.h"

namespace attnd::sm80 {

struct FloatMath : Float32 {
  static constexpr int kOperandWords = 8;  // of a: four high ones, four low ones
  static constexpr int kPairWords = 4;     // of a lane's probabilities of eight keys: [element]
  template <int kGroups>
  static constexpr int kTogether = kGroups < 4 ? kGroups : 4;

  // Column of element e of group `group` among kGroups that MultiplyRows filled.
  template <int kGroups>
  ATTN_HD static constexpr int Column(int group, int e, int lane) {
    constexpr int kWidth = kTogether<kGroups>;
    return group / kWidth * 8 * kWidth + Accumulator::Col(e, lane) * kWidth + group % kWidth;
  }

  ATTN_HD static void ToOperand(uint4 v, uint32_t (&words)[kOperandWords]) {
    uint32_t all[4];
    ToWords(v, all);
#pragma unroll
    for (int n = 0; n < 4; ++n) Split(all[n], words[n], words[n + 4]);
  }
  // Splits probabilities, as MultiplyRows takes them. Low parts are positive too, since their
  // factors may be infinite.
  ATTN_HD static void ProbabilityOperand(const uint32_t (&p)[kPairWords],
                                         uint32_t (&words)[kOperandWords]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t bits = p[(n & 1) * 2 + (n >> 1)];
      words[n] = bits & ~kTf32Rest;
      const float low = ptx::BitsFloat(bits) - ptx::BitsFloat(words[n]);
      const float positive = ptx::Fma(ptx::BitsFloat(bits), kTiny, low);
      words[n + 4] = ptx::FloatBits(positive) + (kTf32Rest + 1) / 2;
    }
  }
  // Spreads one of two scores' masks of dropout, half of a word, over a whole word.
  ATTN_HD static uint32_t Spread(uint32_t mask, int n) {
    return ptx::Permute(mask, 0, n ? 0x3232u : 0x1010u);
  }

  // Two groups of columns, b from the rows of its transpose.
  template <int kTiles, int kGroups>
  ATTN_HD static void Multiply(float (&sums)[kTiles][kGroups][4], int group,
                               const uint32_t (&a)[kTiles][kOperandWords], uint4 b) {
    Pair pair;
    Split(b.x, pair.high[0][0], pair.low[0][0]);
    Split(b.y, pair.high[0][1], pair.low[0][1]);
    Split(b.z, pair.high[1][0], pair.low[1][0]);
    Split(b.w, pair.high[1][1], pair.low[1][1]);
    MultiplyPair(sums, group, a, pair);
  }

  // The same added to sums that stay for many.
  template <int kTiles, int kGroups>
  ATTN_HD static void AddProduct(float (&sums)[kTiles][kGroups][4], int group,
                                 const uint32_t (&a)[kTiles][kOperandWords], uint4 b) {
    float part[kTiles][2][4] = {};
    Multiply(part, 0, a, b);
    AddPair(part, sums, group);
  }
  // The same of one tile's rows `a` and any numbers: an infinity meets the sign of what it is
  // multiplied with, and what TF32 rounds to infinity is truncated instead. [warp]
  template <int kGroups>
  ATTN_HD static void AddAny(float (&sums)[kGroups][4], int group, uint4 a, uint4 b) {
    uint32_t rows[4], columns[4];
    ToWords(a, rows);
    ToWords(b, columns);
    AnyNumber a_any[4], b_any[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      a_any[n] = AnyNumber(rows[n]);
      b_any[n] = AnyNumber(columns[n]);
    }
    uint32_t finite[1][kOperandWords], infinite[4], signs[4];
    Pair pair;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      finite[0][n] = a_any[n].high;
      finite[0][n + 4] = a_any[n].low;
      infinite[n] = a_any[n].infinite;
      signs[n] = a_any[n].sign;
      pair.high[n >> 1][n & 1] = b_any[n].high;
      pair.low[n >> 1][n & 1] = b_any[n].low;
    }
    float part[1][2][4] = {}, beside[1][2][4] = {};
    MultiplyPair(part, 0, finite, pair);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::MmaTf32(beside[0][n], infinite, b_any[2 * n].sign, b_any[2 * n + 1].sign);
      ptx::MmaTf32(beside[0][n], signs, b_any[2 * n].infinite, b_any[2 * n + 1].infinite);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[group + n][e] += part[0][n][e];
        sums[group + n][e] += beside[0][n][e];
      }
    }
  }

  // Takes `part` to `sums` and begins it anew.
  template <int kTiles, int kGroups>
  ATTN_HD static void Fold(float (&part)[kTiles][kGroups][4], float (&sums)[kTiles][kGroups][4]) {
#pragma unroll
    for (int n = 0; n < kTiles * kGroups * 4; ++n) {
      float& from = part[n / (4 * kGroups)][n / 4 % kGroups][n & 3];
      sums[n / (4 * kGroups)][n / 4 % kGroups][n & 3] += from;
      from = 0;
    }
  }

  // sums += a·b, where b is eight rows of a tile from `row` on, and of these kGroups·8 columns from
  // `chunk` on.
  template <int kPitch, int kTiles, int kGroups>
  ATTN_HD static void MultiplyRows(const uint32_t (&a)[kTiles][kOperandWords], const void* tile,
                                   int row, int chunk, int lane,
                                   float (&sums)[kTiles][kGroups][4]) {
    constexpr int kWidth = kTogether<kGroups>;
    const int even = RowsOffset<kPitch, kWidth>(0, chunk, lane);
    const int odd = RowsOffset<kPitch, kWidth>(1, chunk, lane);
#pragma unroll
    for (int first = 0; first < kGroups; first += kWidth) {
      uint32_t b[2][kWidth];
      Load(At(tile, Moved<kPitch>(even, row, first * 2)), b[0]);
      Load(At(tile, Moved<kPitch>(odd, row, first * 2)), b[1]);
#pragma unroll
      for (int n = 0; n < kWidth; n += 2) {
        MultiplyPair(sums, first + n, a, PairOf(b, n));
      }
    }
  }
  // The same of 8·kSteps rows, added to sums that stay for many.
  template <int kPitch, int kSteps, int kTiles, int kGroups>
  ATTN_HD static void AddRows(const uint32_t (&a)[kSteps][kTiles][kOperandWords], const void* tile,
                              int row, int lane, float (&sums)[kTiles][kGroups][4]) {
    constexpr int kWidth = kTogether<kGroups>;
    const int even = RowsOffset<kPitch, kWidth>(0, 0, lane);
    const int odd = RowsOffset<kPitch, kWidth>(1, 0, lane);
#pragma unroll
    for (int first = 0; first < kGroups; first += kWidth) {
      uint32_t b[kSteps][2][kWidth];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        Load(At(tile, Moved<kPitch>(even, row + s * 8, first * 2)), b[s][0]);
        Load(At(tile, Moved<kPitch>(odd, row + s * 8, first * 2)), b[s][1]);
      }
#pragma unroll
      for (int n = 0; n < kWidth; n += 2) {
        float part[kTiles][2][4] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) MultiplyPair(part, 0, a[s], PairOf(b[s], n));
        AddPair(part, sums, first + n);
      }
    }
  }

  // Infinities and NaN of operands are in none of their right places, nor is what TF32 rounds to
  // infinity: such scores of rows of `a` by rows of `b` are made again. `Place`: (tile, group,
  // element) to the two rows. [warp]
  template <int kPitch, int kChunks, int kTiles, int kGroups, class Place>
  ATTN_HD static void Repair(const void* a, const void* b, const Place& place,
                             float (&sums)[kTiles][kGroups][4]) {
    float all = 0;
#pragma unroll
    for (int n = 0; n < kTiles * kGroups * 4; ++n) {
      all = ptx::Fma(sums[n / (4 * kGroups)][n / 4 % kGroups][n & 3], 0.0f, all);
    }
    if (!ptx::VoteAny(!(all == 0))) return;
#pragma unroll 1
    for (int at = 0; at < kTiles * kGroups * 4; ++at) {
      const auto rows = place(at / (4 * kGroups), at / 4 % kGroups, at & 3);
      const float sum = Dot<kPitch, kChunks>(a, rows.a, b, rows.b);
#pragma unroll
      for (int n = 0; n < kTiles * kGroups * 4; ++n) {
        float& score = sums[n / (4 * kGroups)][n / 4 % kGroups][n & 3];
        if (n == at && !(score - score == 0)) score = sum;
      }
    }
  }
  struct Rows {
    int a, b;
  };

 private:
  static constexpr uint32_t kTf32Rest = 0x1fffu;  // bits of a float32 that TF32 lacks
  static constexpr uint32_t kInfinity = 0x7f800000u, kOne = 0x3f800000u;
  static constexpr float kTiny = 9.3132e-10f;      // 2^-30
  static constexpr float kLeastLow = -4.1538e34f;  // −2^115

  // The parts of two groups: [group][k index and k index + 4].
  struct Pair {
    uint32_t high[2][2], low[2][2];
  };

  // Rounded as RoundToTf32 does, but for infinities and NaN, whose low part is NaN, in fewer
  // instructions.
  ATTN_HD static void Split(uint32_t bits, uint32_t& high, uint32_t& low) {
    high = (bits + (kTf32Rest + 1) / 2) & ~kTf32Rest;
    low = ptx::FloatBits(ptx::BitsFloat(bits) - ptx::BitsFloat(high));
  }
  // A number as the sum of two TF32 ones, if it is finite, else zero; infinity or NaN, else zero;
  // and its sign, or zero or NaN. A NaN whose bits TF32 lacks stays one.
  struct AnyNumber {
    uint32_t high, low, infinite, sign;
    AnyNumber() = default;
    ATTN_HD explicit AnyNumber(uint32_t bits) {
      const uint32_t size = bits & kMagnitude;
      if (size > kInfinity) bits = kMagnitude;
      Split(bits, high, low);
      if ((high & kMagnitude) == kInfinity) {
        high = bits & ~kTf32Rest;
        low = ptx::FloatBits(ptx::BitsFloat(bits) - ptx::BitsFloat(high));
      }
      const bool is_finite = size < kInfinity;
      infinite = is_finite ? 0 : bits;
      sign = size == 0 || size > kInfinity ? bits : (bits & ~kMagnitude) | kOne;
      if (!is_finite) high = low = 0;
    }
  };
  template <int kTiles, int kGroups>
  ATTN_HD static void AddPair(const float (&part)[kTiles][2][4], float (&sums)[kTiles][kGroups][4],
                              int group) {
#pragma unroll
    for (int m = 0; m < kTiles * 8; ++m) {
      sums[m >> 3][group + (m >> 2 & 1)][m & 3] += part[m >> 3][m >> 2 & 1][m & 3];
    }
  }
  template <int kPitch, int kWidth>
  ATTN_HD static int RowsOffset(int parity, int chunk, int lane) {
    const int column = (lane >> 2) * kWidth;
    return ChunkOffset<kPitch>((lane & 3) * 2 + parity, chunk + (column >> 2)) + (column & 3) * 4;
  }
  // Groups n and n + 1 of what was loaded of even rows and of odd ones.
  template <int kWidth>
  ATTN_HD static Pair PairOf(const uint32_t (&b)[2][kWidth], int n) {
    Pair pair;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      SplitFinite(b[m & 1][n + (m >> 1)], pair.high[m >> 1][m & 1], pair.low[m >> 1][m & 1]);
    }
    return pair;
  }
  // The low part of an infinity is a number.
  ATTN_HD static void SplitFinite(uint32_t bits, uint32_t& high, uint32_t& low) {
    high = ptx::RoundToTf32(ptx::BitsFloat(bits));
    low = ptx::FloatBits(ptx::Max(ptx::BitsFloat(bits) - ptx::BitsFloat(high), kLeastLow));
  }

  template <int kTiles, int kGroups>
  ATTN_HD static void MultiplyPair(float (&sums)[kTiles][kGroups][4], int group,
                                   const uint32_t (&a)[kTiles][kOperandWords], const Pair& b) {
    uint32_t high[kTiles][4], low[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        high[m][n] = a[m][n];
        low[m][n] = a[m][n + 4];
      }
    }
    // Products that need each other's sums stand apart.
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      ptx::MmaTf32(sums[n >> 1][group + (n & 1)], low[n >> 1], b.high[n & 1][0], b.high[n & 1][1]);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      ptx::MmaTf32(sums[n >> 1][group + (n & 1)], high[n >> 1], b.low[n & 1][0], b.low[n & 1][1]);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      ptx::MmaTf32(sums[n >> 1][group + (n & 1)], high[n >> 1], b.high[n & 1][0], b.high[n & 1][1]);
    }
  }

  ATTN_HD static void Load(const void* from, uint32_t (&to)[2]) {
    const uint2 v = ptx::LoadShared64(from);
    to[0] = v.x;
    to[1] = v.y;
  }
  ATTN_HD static void Load(const void* from, uint32_t (&to)[4]) {
    ToWords(ptx::LoadShared128(from), to);
  }

  template <int kPitch, int kChunks>
  ATTN_HD static float Dot(const void* a, int a_row, const void* b, int b_row) {
    float sum = 0;
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      uint32_t x[4], y[4];
      ToWords(ptx::LoadShared128(At(a, ChunkOffset<kPitch>(a_row, c))), x);
      ToWords(ptx::LoadShared128(At(b, ChunkOffset<kPitch>(b_row, c))), y);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum = ptx::Fma(ptx::BitsFloat(x[n]), ptx::BitsFloat(y[n]), sum);
      }
    }
    return sum;
  }
};

// Byte offset of a number in a tile of float32.
template <int kPitch>
ATTN_HD constexpr int NumberOffset(int row, int column) {
  return ChunkOffset<kPitch>(row, column >> 2) + (column & 3) * 4;
}

}  // namespace attnd::sm80
