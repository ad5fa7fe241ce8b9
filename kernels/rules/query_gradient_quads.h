// DqKernel (query_gradient.h) where four neighbouring lanes hold eight neighbouring columns of a
// row, as m16n8k16's accumulators do: 16 bytes each of two sums are 16 bytes of dQ. What a thread
// loads it writes, so no warp waits for another. Errors: none.
#pragma once

#include "kernels/rules/query_gradient.h"

namespace attnd {

// Sums that a launch before has left.
struct AllAtOnce {
  static constexpr bool kLastFirst = true, kStartsAhead = false;
  ATTN_HD void Await(const ProblemDesc&, const SequenceDesc&, const TileWork&) {}
  ATTN_HD void End() {}
};

// `Dq` as in DqKernel; a lane's sums are kQueryTiles × kColumnTiles accumulators, of 16 rows by 8
// columns each (QueryOf, FirstColumn). `Start` says when a tile's sums are there:
//   kLastFirst         whether the last tiles come first: of those the L2 still has the sums
//   kStartsAhead       whether blocks run before that launch has ended
//   Await(p, s, tile)  waits for a tile's, which comes after those before in this order
//   End()              is the last block's end
template <class Dq, class Element, class Rounding, class DqSums, class Start>
struct QuadDqKernel {
  using Head = DqHead<Dq::kColumns, Rounding, DqSums>;
  static constexpr bool kStartsAhead = Start::kStartsAhead;
  static constexpr int kThreads = 256;
  static constexpr int kTiles = Dq::kQueryTiles * Dq::kColumnTiles;  // of a warp
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const int lane = at.thread & 31, warp = at.thread >> 5;
    Start start;
#pragma unroll 1
    for (int n = at.block; n < params.tile_count; n += at.blocks) {
      const TileWork tile = params.tiles[Start::kLastFirst ? params.tile_count - 1 - n : n];
      const ProblemDesc& p = params.problems[tile.problem];
      const SequenceDesc& s = p.sequences[tile.batch];
      start.Await(p, s, tile);
#pragma unroll 1
      for (int of = lane >> 3; of < kTiles; of += 4) RunTile(params, tile, of, warp, lane & 7);
      RestoreRows<Element>(p, s, tile, warp, lane);
    }
    if (at.block == at.blocks - 1) start.End();
  }

 private:
  // The warp's n-th accumulator: of it rows `quad` and quad + 8. More under way at once has no use.
  ATTN_HD static void RunTile(const LaunchParams& params, const TileWork& tile, int n, int warp,
                              int quad) {
    const ProblemDesc& p = params.problems[tile.problem];
    const float* const from =
        p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
        int64_t{tile.tile} * Dq::kBlockFloats + warp * Dq::kSums * 32 + n * 128 + quad * 4;
    uint4 sums[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = ptx::LoadGlobal128(from + e * 32);
    const Head head(params, tile);
    const Row rows[2] = {RowAt(head, n, 0, warp, quad), RowAt(head, n, 1, warp, quad)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      WriteChunk(head, rows[r], from + r * 64, sums[2 * r], sums[2 * r + 1]);
    }
  }
  // Eight columns of a row, and what is looked up for them: not where they are beyond the end.
  struct Row {
    int row, column;
    float factor = 1;
    uint32_t marks = 0;
    bool exists;
  };
  ATTN_HD static Row RowAt(const Head& head, int accumulator, int r, int warp, int quad) {
    Row at;
    at.row = head.tile.tile * kDqBlockRows +
             Dq::QueryOf(accumulator / Dq::kColumnTiles, r, warp, quad * 4);
    at.column = Dq::FirstColumn(warp) + accumulator % Dq::kColumnTiles * 8;
    at.exists = at.row < head.s.q_len && at.column < head.p.qk_chunks * 8;
    if (DqSums::kFixedPoint && at.exists) {
      at.factor = head.FactorOf(at.row % kDqBlockRows);
      at.marks = head.MarksOf(at.row, at.column / 32) >> (at.column % 32);
    }
    return at;
  }
  // The even and the odd columns' sums; `from`: where those were loaded.
  ATTN_HD static void WriteChunk(const Head& head, const Row& at, const float* from, uint4 even,
                                 uint4 odd) {
    const ProblemDesc& p = head.p;
    if (!at.exists) return;
    const GradientWriter writer(p, p.scale * (1.0f + Rounding::kLoss),
                                p.d_q_exponent - head.SumExponent(at.factor));
    const bool has_rest =
        DqSums::kFixedPoint && p.dq_rest != 0 && (!p.dq_rests_by_row || at.factor < 0);
    float a[4], b[4];
    ToFloats(head, has_rest, from, even, a);
    ToFloats(head, has_rest, from + 32, odd, b);
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      words[n] = writer.template PackAs<Element>(a[n], b[n]) | NanOfPair(at.marks >> 2 * n);
    }
    char* const out = RowOf(p.d_q, head.s.batch, head.tile.head, int64_t{head.s.q_begin} + at.row);
    ptx::StoreGlobal128(out + at.column * 2, make_uint4(words[0], words[1], words[2], words[3]));
  }
  ATTN_HD static void ToFloats(const Head& head, bool has_rest, const float* from, uint4 sums,
                               float (&out)[4]) {
    const uint32_t bits[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      out[n] = DqSums::kFixedPoint ? static_cast<float>(static_cast<int32_t>(bits[n]))
                                   : ptx::BitsFloat(bits[n]);
    }
    if (!has_rest) return;
    const uint4 loaded = ptx::LoadGlobal128(from + head.p.dq_rest);
    const uint32_t rests[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      out[n] = SumWithRest(bits[n], rests[n], head.rest_bits);
    }
  }
};

}  // namespace attnd
