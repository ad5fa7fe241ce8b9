// What backward needs before and after its one large kernel: delta and the bounds of dS, and dQ's
// float32 sums put into place. Small kernels, bound by memory; 64 rows a block.
// Errors: none.
#pragma once

#include "kernels/gradient_scale.h"
#include "kernels/online_softmax.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

// float16 reaches down to 6e-8 only, so P is kept as P·2^10 (at most 1025) and dS as
// kernels/gradient_scale.h says; the last factors take it back. Powers of two, so no bits are lost.
inline constexpr int kProbabilityShift = 10;

// How dQ is summed over tiles of keys.
struct FixedPointSums {
  static constexpr bool kFixedPoint = true;
};
struct FloatSums {
  static constexpr bool kFixedPoint = false;
};

// dQ as integers, whose sum does not depend on the order: a row's numbers times a power of two of
// its own. Since a row of P sums to 1,
//   |Σ dS·K| ≤ (Z·‖dO‖·max‖V‖ + |delta|)·max|K| =: bound, bound·2^exponent < 2^30
// and one rounding costs 2^-31 of the bound at most. What is not finite is marked (dq_spoiled).
struct FixedPoint {
  float value, key;  // Z·max‖V‖, max|K|
  int gain;          // of dS

  ATTN_HD static FixedPoint Of(const ProblemDesc& p, int batch, int kv_head) {
    const uint32_t* bounds = GradientBounds(p, batch, kv_head);
    const float value = ptx::BitsFloat(ptx::LoadConstant32(bounds + kValueBound));
    const float key = ptx::BitsFloat(ptx::LoadConstant32(bounds + kKeyBound));
    return {SquareRoot(value) * p.dropout_scale, key, GradientExponent(p, batch, kv_head)};
  }
  // Of the power of two that a row's sums, which are 2^gain too large, are multiplied by.
  ATTN_HD int Exponent(float norm, float delta) const {
    const float bound = ptx::Fma(norm, value, delta < 0 ? -delta : delta) * key;
    const int exponent = 29 + 127 - static_cast<int>(ptx::FloatBits(bound) >> 23) - gain;
    return exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  }
};

// Where dQ's sums lie: 64 queries × head_dim in parts of at most 128 columns, each cut over eight
// warps, register by register.
template <int kHeadDim>
struct DqLayout {
  static constexpr int kOut = kHeadDim < 128 ? kHeadDim : 128;  // columns of a part
  static constexpr int kWarps = 8;
  static constexpr int kSums = kOut / 4;               // on a lane
  static constexpr int kFloats = kWarps * kSums * 32;  // of a part
  static constexpr int kBlockFloats = kFloats * (kHeadDim / kOut);
  // Query (0..63) and column of sum n: sets of 8 accumulators; for wide heads an LDS.128 of K feeds
  // two sets side by side, for narrow ones an LDS.64 feeds one.
  static constexpr bool kWide = kHeadDim >= 128;
  ATTN_HD static constexpr int Set(int n) { return kWide ? n >> 4 & 1 : n >> 3; }
  ATTN_HD static int Query(int n, int warp, Lane lane) {
    const int set = Set(n);
    return (warp >> 2) * 32 + lane.upper() * 16 + set * 8 + lane.row_half() * 4 + (lane.index & 1) +
           (n & 2);
  }
  ATTN_HD static int Column(int n, int warp, Lane lane) {
    const int in_quad = (lane.index & 2) + (n & 1);
    if (!kWide) return Chunk(warp, lane) * 8 + (n & 4) + in_quad;
    return (Chunk(warp, lane) + (n >> 2 & 1)) * 8 + (n >> 3 & 1) * 4 + in_quad;
  }
  // First chunk of K that this lane's column half multiplies; bit 2 by the half, so that loads do
  // not conflict.
  ATTN_HD static int Chunk(int warp, Lane lane) {
    const int group = warp & 3;
    if (!kWide) return lane.column_half() * 4 + group;
    return lane.column_half() * 4 + (group & 1) * 2 + (group >> 1) * 8;
  }
};

// Bits of one row of dQ whose sums are not finite: one for each column.
template <int kHeadDim>
ATTN_HD uint32_t* DqSpoiled(const ProblemDesc& p, int batch, int head, int row) {
  return p.dq_spoiled + (int64_t{batch} * p.q_heads + head) * p.spoiled_head +
         int64_t{row} * (kHeadDim / 32);
}

ATTN_HD const char* RowOf(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
  return static_cast<const char*>(t.data) +
         2 * (batch * t.batch + head * t.head + row * t.row_stride);
}

// delta = rowsum(dO∘O) − dlse, ‖dO‖ and the stabiliser of P: 64 rows of a query head, four lanes a
// row. Also what bounds dS and dQ of the KV head; the heads of a group share the rows of K and V.
struct DeltaKernel {
  static constexpr int kThreads = 256;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int row = tile.tile * kDqBlockRows + (at.thread >> 2);
    const bool exists = row < s.q_len;
    const int64_t at_row = int64_t{s.q_begin} + (exists ? row : 0);
    const char* o = RowOf(p.o, s.batch, tile.head, at_row);
    const char* d_o = RowOf(p.d_o, s.batch, tile.head, at_row);
    float sum = 0, norm = 0;
    if (exists) {
      for (int c = at.thread & 3; c < p.v_chunks; c += 4) {
        const uint4 chunk = ptx::LoadConstant128(d_o + c * 16);
        sum += Dot(ptx::LoadConstant128(o + c * 16), chunk);
        norm += FiniteNorm(chunk);
      }
    }
    sum = SumOfQuad(sum);
    const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + at_row;
    if (p.d_lse != nullptr) sum -= ptx::LoadConstantFloat(p.d_lse + index);
    norm = SumOfQuad(norm);
    if (exists && (at.thread & 3) == 0) {
      const float lse = ptx::LoadConstantFloat(p.lse + index);
      ptx::StoreGlobalFloat(p.delta + index, sum);
      ptx::StoreGlobalFloat(p.d_o_norm + index, SquareRoot(norm));
      ptx::StoreGlobalFloat(p.stabilizer + index, StabilizerOf(lse));
    }
    uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
    Widen(bounds + kOutputGradientBound, norm, at.thread);
    const float size = sum < 0 ? -sum : sum;
    Widen(bounds + kDeltaBound, exists && size < Infinity() ? size : 0, at.thread);
    const KeyBounds keys = BoundsOfKeys(p, s, tile, at.thread);
    Widen(bounds + kValueBound, keys.value_norm, at.thread);
    Widen(bounds + kKeyBound, keys.key, at.thread);
  }

 private:
  struct KeyBounds {
    float value_norm, key;  // max‖V‖², max|K|
  };
  // Of this block's share of the keys that some row sees.
  ATTN_HD static KeyBounds BoundsOfKeys(const ProblemDesc& p, const SequenceDesc& s,
                                        const TileWork& tile, int thread) {
    const int kv_head = tile.head / p.group, blocks = static_cast<int>(DqBlocks(s.q_len));
    const int share = (tile.head - kv_head * p.group) * blocks + tile.tile;
    KeyBounds largest = {0, 0};
    for (int first = share * kDqBlockRows; first < s.kv_len;
         first += p.group * blocks * kDqBlockRows) {
      const int key = first + (thread >> 2);
      const Range rows = RowsThatSee(VisibilityOf(s), key, key + 1);
      float norm = 0;
      if (key < s.kv_len && rows.begin < rows.end) {
        const char* v = RowOf(p.v, s.batch, kv_head, int64_t{s.kv_begin} + key);
        for (int c = thread & 3; c < p.v_chunks; c += 4) {
          norm += FiniteNorm(ptx::LoadConstant128(v + c * 16));
        }
        const char* k = RowOf(p.k, s.batch, kv_head, int64_t{s.kv_begin} + key);
        for (int c = thread & 3; c < p.qk_chunks; c += 4) {
          largest.key = ptx::Max(largest.key, FiniteMax(ptx::LoadConstant128(k + c * 16)));
        }
      }
      largest.value_norm = ptx::Max(largest.value_norm, SumOfQuad(norm));
    }
    return largest;
  }
  ATTN_HD static float StabilizerOf(float lse) {
    if (lse == -Infinity()) return Infinity();
    return ptx::Fma(lse, kLog2E, -(kTruncationBias + kProbabilityShift));
  }
  ATTN_HD static float FiniteMax(uint4 chunk) {
    const uint4 x = Finite(chunk);
    return ptx::Max(ptx::Max(Larger(x.x), Larger(x.y)), ptx::Max(Larger(x.z), Larger(x.w)));
  }
  ATTN_HD static float Larger(uint32_t word) {
    return ptx::Max(ptx::LowHalf(word & 0x7fff7fffu), ptx::HighHalf(word & 0x7fff7fffu));
  }
  ATTN_HD static float FiniteNorm(uint4 chunk) { return Dot(Finite(chunk), Finite(chunk)); }
  ATTN_HD static uint4 Finite(uint4 x) {
    return make_uint4(x.x & ~NonFiniteHalves(x.x), x.y & ~NonFiniteHalves(x.y),
                      x.z & ~NonFiniteHalves(x.z), x.w & ~NonFiniteHalves(x.w));
  }
  ATTN_HD static float SumOfQuad(float x) {
    x += ptx::ShuffleXor(x, 1);
    return x + ptx::ShuffleXor(x, 2);
  }
  ATTN_HD static void Widen(uint32_t* bound, float value, int thread) {
    for (int mask = 1; mask < 32; mask <<= 1) value = ptx::Max(value, ptx::ShuffleXor(value, mask));
    if ((thread & 31) == 0) ptx::ReduceMax(bound, ptx::FloatBits(value));
  }
  ATTN_HD static float Dot(uint4 a, uint4 b) {
    return Dot(a.x, b.x) + Dot(a.y, b.y) + (Dot(a.z, b.z) + Dot(a.w, b.w));
  }
  ATTN_HD static float Dot(uint32_t a, uint32_t b) {
    return ptx::Fma(ptx::LowHalf(a), ptx::LowHalf(b), ptx::HighHalf(a) * ptx::HighHalf(b));
  }
};

// dQ's sums into place: 64 rows of a query head.
template <int kHeadDim, class DqSums>
struct DqKernel {
  static constexpr int kThreads = 256;
  struct Shared {};
  using Dq = DqLayout<kHeadDim>;

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const Lane lane = {at.thread & 31};
    const int warp = at.thread >> 5;
    const float* from = p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
                        int64_t{tile.tile} * Dq::kBlockFloats + warp * Dq::kSums * 32 + lane.index;
#pragma unroll 1
    for (int part = 0; part < kHeadDim / Dq::kOut; ++part, from += Dq::kFloats) {
#pragma unroll
      for (int n = 0; n < Dq::kSums; n += 2) {
        const int row = tile.tile * kDqBlockRows + Dq::Query(n, warp, lane);
        const int column = part * Dq::kOut + Dq::Column(n, warp, lane);
        if (row < s.q_len && column < p.qk_chunks * 8) {
          Write(p, s, tile, row, column, from + n * 32);
        }
      }
    }
  }

 private:
  ATTN_HD static void Write(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                            int row, int column, const float* sums) {
    const GradientWriter writer(p, p.scale * (1.0f + kTruncationLoss),
                                p.d_q_exponent - SumExponent(p, s, tile, row));
    float low = Sum(sums), high = Sum(sums + 32);
    if constexpr (DqSums::kFixedPoint) {
      const uint32_t spoiled =
          ptx::LoadGlobal32(DqSpoiled<kHeadDim>(p, tile.batch, tile.head, row) + (column >> 5)) >>
          (column & 31);
      if (spoiled & 1) low = ptx::BitsFloat(0x7fffffffu);
      if (spoiled & 2) high = ptx::BitsFloat(0x7fffffffu);
    }
    char* out = const_cast<char*>(RowOf(p.d_q, s.batch, tile.head, int64_t{s.q_begin} + row));
    ptx::StoreGlobal32(out + 2 * column, writer.Pack(low, high));
  }
  ATTN_HD static float Sum(const float* at) {
    if constexpr (!DqSums::kFixedPoint) return ptx::LoadGlobalFloat(at);
    return static_cast<float>(static_cast<int32_t>(ptx::LoadGlobal32(at)));
  }
  // The sums are dQ / scale times 2^this.
  ATTN_HD static int SumExponent(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                                 int row) {
    const int kv_head = tile.head / p.group;
    if constexpr (!DqSums::kFixedPoint) return GradientExponent(p, tile.batch, kv_head);
    const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + s.q_begin + row;
    const FixedPoint sums = FixedPoint::Of(p, tile.batch, kv_head);
    return sums.gain + sums.Exponent(ptx::LoadConstantFloat(p.d_o_norm + index),
                                     ptx::LoadConstantFloat(p.delta + index));
  }
};

}  // namespace attnd::sm70
