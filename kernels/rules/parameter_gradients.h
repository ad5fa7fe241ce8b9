// Gradients of what is added to scores, in float32, by recomputing scores one by one: plain loops
// over the same rules as the other kernels, no tensor cores. Any architecture.
//   dbias = Σ dS over the bias's broadcast dimensions     dS = P∘(Z∘dP − delta), before scale
//   dsink[b, h] = −Σ_i e^(logit(h) − lse_i)·delta_i
// Order: within (b, h) over keys and rows, then heads, then batch entries, each ascending, so that
// a client that splits by batch or head can rebuild the same bits. Needs delta (DeltaKernel).
#pragma once

#include "attention/dropout.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

// One block of 256 threads for one (problem, batch, query head); TileWork.tile is not used.
struct SinkGradientKernel {
  static constexpr int kThreads = 256;
  struct Shared {
    float sums[kThreads / 32];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int64_t first = s.batch * p.lse_batch + tile.head * p.lse_head + s.q_begin;
    const float logit = ptx::LoadConstantFloat(p.sink_logits + tile.head);
    float sum = 0;
    for (int row = at.thread; row < s.q_len; row += kThreads) {
      const float lse = ptx::LoadConstantFloat(p.lse + first + row);
      const float delta = ptx::LoadConstantFloat(p.delta + first + row);
      if (lse != -Infinity()) sum -= ptx::Exp2((logit - lse) * kLog2E) * delta;
    }
    for (int mask = 16; mask > 0; mask >>= 1) sum += ptx::ShuffleXor(sum, mask);
    if ((at.thread & 31) == 0) ptx::StoreSharedFloat(&shared.sums[at.thread >> 5], sum);
    ptx::SyncThreads();
    if (at.thread != 0) return;
    float total = 0;
    for (int n = 0; n < kThreads / 32; ++n) total += ptx::LoadSharedFloat(&shared.sums[n]);
    ptx::StoreGlobalFloat(p.d_sink + int64_t{tile.batch} * p.q_heads + tile.head, total);
  }
};

// One block of 256 threads for 16×16 numbers of dbias: TileWork.batch and head are the bias's (0
// where broadcast), tile = row tile · ceil(columns / 16) + column tile; a broadcast dimension has
// one tile. Which dimensions are broadcast is told by bias's strides of 0 (column: 0).
template <class Element>
struct BiasGradientKernel {
  static constexpr int kThreads = 256, kEdge = 16;
  struct Shared {
    float parts[kThreads];
  };

  // Sizes of the bias: what a tile list is made from.
  ATTN_HD static int Tiles(int64_t size) { return static_cast<int>((size + kEdge - 1) / kEdge); }

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const Work work = {p, tile, at.thread / kEdge, at.thread % kEdge, ColumnTiles(p)};
    const int batches = p.bias.batch == 0 ? p.batch_count : tile.batch + 1;
    const int heads = p.bias.head == 0 ? p.q_heads : tile.head + 1;
    float total = 0;
    for (int b = tile.batch; b < batches; ++b) {
      float of_entry = 0;
      for (int h = tile.head; h < heads; ++h) of_entry += OfHead(work, b, h, shared);
      total += of_entry;
    }
    Write(work, total);
  }

 private:
  struct Work {
    const ProblemDesc& problem;
    const TileWork& tile;
    int row, column;  // of the thread within the tile
    int column_tiles;
  };
  ATTN_HD static int ColumnTiles(const ProblemDesc& p) {
    return p.bias.column == 0 ? 1 : Tiles(p.bias_columns);
  }
  ATTN_HD static int FirstRow(const Work& w) { return w.tile.tile / w.column_tiles * kEdge; }
  ATTN_HD static int FirstKey(const Work& w) { return w.tile.tile % w.column_tiles * kEdge; }

  // Returns the term that (batch entry, head) adds to this thread's number: its own dS, or the sum
  // over broadcast rows or columns.
  ATTN_HD static float OfHead(const Work& w, int batch, int head, Shared& shared) {
    const ProblemDesc& p = w.problem;
    const SequenceDesc& s = p.sequences[batch];
    const ScoreContext at = {p, s, batch, head, GeneralScores::OptionsOf(p)};
    const bool all_rows = p.bias.row == 0, all_keys = p.bias.column == 0;
    const int end_row = all_rows ? s.q_len : MinInt(s.q_len, FirstRow(w) + kEdge);
    const int end_key = all_keys ? s.kv_len : MinInt(s.kv_len, FirstKey(w) + kEdge);
    MaskLookup mask(p.tile_lists, batch, head);
    float sum = 0;
    for (int i = FirstRow(w) + w.row; i < end_row; i += kEdge) {
      float of_row = 0;
      for (int j = FirstKey(w) + w.column; j < end_key; j += kEdge)
        of_row += ScoreGradient(at, mask, i, j);
      sum += of_row;
    }
    return all_rows || all_keys ? Gather(w, sum, all_rows, all_keys, shared) : sum;
  }
  ATTN_HD static float Gather(const Work& w, float part, bool rows, bool columns, Shared& shared) {
    const int thread = w.row * kEdge + w.column;
    ptx::StoreSharedFloat(&shared.parts[thread], part);
    ptx::SyncThreads();
    float sum = 0;
    for (int i = rows ? 0 : w.row; i < (rows ? kEdge : w.row + 1); ++i) {
      for (int j = columns ? 0 : w.column; j < (columns ? kEdge : w.column + 1); ++j) {
        sum += ptx::LoadSharedFloat(&shared.parts[i * kEdge + j]);
      }
    }
    ptx::SyncThreads();
    return sum;
  }
  ATTN_HD static void Write(const Work& w, float total) {
    const BroadcastTensor& bias = w.problem.bias;
    if (bias.row == 0 && w.row != 0) return;
    if (bias.column == 0 && w.column != 0) return;
    const int64_t row = bias.row == 0 ? 0 : FirstRow(w) + w.row;
    const int64_t key = bias.column == 0 ? 0 : FirstKey(w) + w.column;
    if (bias.row != 0 && row >= w.problem.bias_rows) return;
    if (bias.column != 0 && key >= w.problem.bias_columns) return;
    ptx::StoreGlobalFloat(w.problem.d_bias + w.tile.batch * bias.batch + w.tile.head * bias.head +
                              row * bias.row + key * bias.column,
                          total);
  }

  ATTN_HD static float ScoreGradient(const ScoreContext& at, MaskLookup& mask, int row, int key) {
    const ProblemDesc& p = at.problem;
    const SequenceDesc& s = at.sequence;
    const int kv_head = at.head / p.group;
    const int64_t q_row = int64_t{s.q_begin} + row, k_row = int64_t{s.kv_begin} + key;
    const int64_t at_row = s.batch * p.lse_batch + at.head * p.lse_head + q_row;
    const float lse = ptx::LoadConstantFloat(p.lse + at_row);
    const float product =
        Dot(RowOf(p.q, s.batch, at.head, q_row), RowOf(p.k, s.batch, kv_head, k_row), p.qk_chunks);
    const Scored scored = GeneralScores::Apply(at, mask, row, key, product);
    if (!scored.visible || lse == -Infinity()) return 0;
    const float probability = ptx::Exp2((scored.score - lse) * kLog2E);
    float d_p =
        Dot(RowOf(p.d_o, s.batch, at.head, q_row), RowOf(p.v, s.batch, kv_head, k_row), p.v_chunks);
    if (p.dropout_threshold != 0) d_p *= DropoutFactor(at, row, key);
    return probability * (d_p - ptx::LoadConstantFloat(p.delta + at_row));
  }
  ATTN_HD static float DropoutFactor(const ScoreContext& at, int row, int key) {
    const ProblemDesc& p = at.problem;
    const DropoutStream stream = {p.dropout_key_lo, p.dropout_key_hi, p.dropout_offset_lo,
                                  p.dropout_head + at.batch * p.dropout_batch + at.head};
    return DropoutByte(stream, row, key) < p.dropout_threshold ? 0.0f : p.dropout_scale;
  }
  ATTN_HD static float Dot(const char* a, const char* b, int chunks) {
    float sum = 0;
    for (int c = 0; c < chunks; ++c) {
      sum = DotOfChunks<Element>(ptx::LoadConstant128(a + c * 16), ptx::LoadConstant128(b + c * 16),
                                 sum);
    }
    return sum;
  }
};

}  // namespace attnd
