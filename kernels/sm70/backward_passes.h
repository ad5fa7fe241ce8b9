// What backward needs before and after its one large kernel: delta and the bounds of dS, and dQ's
// float32 sums put into place. Small kernels, bound by memory; 64 rows a block.
// Errors: none.
#pragma once

#include "kernels/gradient_scale.h"
#include "kernels/online_softmax.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

// Where dQ's float32 sums lie: 64 queries × head_dim, cut over eight warps, register by register.
template <int kHeadDim>
struct DqLayout {
  static constexpr int kWarps = 8;
  static constexpr int kSums = kHeadDim / 4;  // on a lane
  static constexpr int kFloats = kWarps * kSums * 32;
  // Query (0..63) and column of sum n: sets of 8 accumulators; for wide heads an LDS.128 of K feeds
  // two sets side by side, for narrow ones an LDS.64 feeds one.
  static constexpr bool kWide = kHeadDim >= 128;
  ATTN_HD static int Query(int n, int warp, Lane lane) {
    const int set = kWide ? n >> 4 & 1 : n >> 3;
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

// delta = rowsum(dO∘O) − dlse: 64 rows of a query head, four lanes a row. Also what bounds dS of
// the KV head (kernels/gradient_scale.h); the heads of a group share the rows of V.
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
    if (exists && (at.thread & 3) == 0) ptx::StoreGlobalFloat(p.delta + index, sum);
    uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
    Widen(bounds + kOutputGradientBound, SumOfQuad(norm), at.thread);
    const float size = sum < 0 ? -sum : sum;
    Widen(bounds + kDeltaBound, exists && size < Infinity() ? size : 0, at.thread);
    Widen(bounds + kValueBound, ValueNorm(p, s, tile, at.thread), at.thread);
  }

 private:
  // The largest ‖V‖² among this block's share of the keys that some row sees.
  ATTN_HD static float ValueNorm(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                                 int thread) {
    const int kv_head = tile.head / p.group, blocks = static_cast<int>(DqBlocks(s.q_len));
    const int share = (tile.head - kv_head * p.group) * blocks + tile.tile;
    float largest = 0;
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
      }
      largest = ptx::Max(largest, SumOfQuad(norm));
    }
    return largest;
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
    for (int mask = 4; mask < 32; mask <<= 1) value = ptx::Max(value, ptx::ShuffleXor(value, mask));
    if ((thread & 31) == 0) ptx::ReduceMax(bound, ptx::FloatBits(value));
  }
  ATTN_HD static const char* RowOf(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
    return static_cast<const char*>(t.data) +
           2 * (batch * t.batch + head * t.head + row * t.row_stride);
  }
  ATTN_HD static float Dot(uint4 a, uint4 b) {
    return Dot(a.x, b.x) + Dot(a.y, b.y) + (Dot(a.z, b.z) + Dot(a.w, b.w));
  }
  ATTN_HD static float Dot(uint32_t a, uint32_t b) {
    return ptx::Fma(ptx::LowHalf(a), ptx::LowHalf(b), ptx::HighHalf(a) * ptx::HighHalf(b));
  }
};

// dQ's float32 sums into place: 64 rows of a query head.
template <int kHeadDim>
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
    const GradientWriter writer(
        p, p.scale * (1.0f + kTruncationLoss),
        p.d_q_exponent - GradientExponent(p, tile.batch, tile.head / p.group));
    const float* from = p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
                        int64_t{tile.tile} * Dq::kFloats + warp * Dq::kSums * 32 + lane.index;
    char* out =
        static_cast<char*>(p.d_q.data) + 2 * (s.batch * p.d_q.batch + tile.head * p.d_q.head +
                                              int64_t{s.q_begin} * p.d_q.row_stride);
#pragma unroll
    for (int n = 0; n < Dq::kSums; n += 2) {
      const int row = tile.tile * kDqBlockRows + Dq::Query(n, warp, lane);
      const int column = Dq::Column(n, warp, lane);
      if (row >= s.q_len || column >= p.qk_chunks * 8) continue;
      const float low = ptx::LoadGlobalFloat(from + n * 32);
      const float high = ptx::LoadGlobalFloat(from + (n + 1) * 32);
      ptx::StoreGlobal32(out + 2 * (int64_t{row} * p.d_q.row_stride + column),
                         writer.Pack(low, high));
    }
  }
};

}  // namespace attnd::sm70
