// The averaged attention map of a forward that has run (attention/patterns/captured_map.h), tile by
// tile and without N² numbers in memory:
//   CaptureScores   S = Q·Kᵀ again, P = exp(S − lse), and ΣP over a share of the call's heads, in
//                   registers, in the order of batch entries and heads: float32
//   CaptureSums     what a tile comes to (capture_sums.h)
// The first is what an architecture's `Products` make of it: slabs of 128 bytes of the rows of Q
// and K come to shared memory, the next while one is multiplied, whatever the head dimension.
// Dropout and V do not matter. Hidden keys and rows that see none count as 0. A warp has kSquares
// squares of 32×32 scores, one below the other, each as two units of eight pairs (bitmaps lie the
// same way: tile_lists.h). Errors: none.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

inline constexpr int kSlabChunks = 8, kSlabBytes = kSlabChunks * 16;  // of a row

// Rows of Q or K that a block brings of one head: `rows` exist from `data` on.
struct SlabRows {
  const char* data;
  int row_bytes, rows;
};

// Products, besides kSquares:
//   Staging                    what a thread holds of a slab on its way
//   Begin, End                 a slab into a buffer; barriers are the caller's
//   Scores, Clear, Score       a lane's scores, and one of them as (unit, pair, element)
//   Place                      where the first of a pair lies in its square
//   Multiply                   adds a slab's products
template <class Products>
struct CaptureScoresKernel {
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kSquares = Products::kSquares, kUnits = 2 * kSquares, kPairs = 8;
  static constexpr int kWarpRows = 32 * kSquares, kWarpKeys = 32;
  static constexpr int kRowWarps = kCaptureRows / kWarpRows;
  static constexpr int kTileKeys = kWarps / kRowWarps * kWarpKeys;

  struct Buffer {
    char q[kCaptureRows * kSlabBytes];
    char k[kTileKeys * kSlabBytes];
    float offset[kCaptureRows];  // lse in units of log2; ∞ where the row sees nothing
  };
  struct alignas(128) Shared {
    Buffer buffers[2];
    Descriptors descriptors[2];  // of the parts of a step and of the next one; no sequence
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    const CaptureDesc& capture = *params.capture;
    const int warp = at.thread >> 5;
    const Work work = {params,
                       capture,
                       tile.tile / capture.key_tiles * kCaptureRows,
                       tile.tile % capture.key_tiles * kTileKeys,
                       at.thread,
                       at.thread & 31,
                       warp % kRowWarps * kWarpRows,
                       warp / kRowWarps * kWarpKeys};
    Sums sums;
#pragma unroll
    for (int n = 0; n < kUnits * kPairs * 2; ++n) sums[n >> 4][n >> 1 & 7][n & 1] = 0;
    AddHeads(work, FirstHead(work, tile.batch, shared), shared, sums);
    Write(work, capture.sums + int64_t{tile.head} * (kCaptureRows * kTileKeys), sums);
  }

 private:
  using Scores = typename Products::Scores;
  using Sums = float[kUnits][kPairs][2];
  struct Work {
    const LaunchParams& params;
    const CaptureDesc& capture;
    int row, key;  // the block's first
    int thread, lane;
    int warp_row, warp_key;  // the warp's first, within the block
  };
  // One of the call's heads and a slab of it. `left`: heads of the split, this one included.
  // `place`: of its part's descriptor.
  struct Step {
    int part, batch, head, slab, left, place;
  };

  ATTN_HD static const ProblemDesc& ProblemOf(const Shared& shared, const Step& step) {
    return shared.descriptors[step.place].problem;
  }
  ATTN_HD static const SequenceDesc& SequenceOf(const Shared& shared, const Step& step) {
    return ProblemOf(shared, step).sequences[step.batch];
  }

  // ---- The steps of a split. All threads walk alike.
  ATTN_HD static void BringPart(const Work& work, const Step& step, Shared& shared) {
    ptx::SyncThreads();  // parts in which the block sees nothing come one after another
    CopyWords(&work.params.problems[step.part], &shared.descriptors[step.place].problem,
              sizeof(ProblemDesc), work.thread, kThreads);
    ptx::SyncThreads();
  }
  ATTN_HD static Step FirstHead(const Work& work, int split, Shared& shared) {
    const CaptureDesc& c = work.capture;
    const int64_t heads = int64_t{c.parts} * c.heads;
    const int begin = static_cast<int>(heads * split / c.splits);
    const int end = static_cast<int>(heads * (split + 1) / c.splits);
    Step step = {begin / c.heads, 0, 0, 0, end - begin, 0};
    BringPart(work, step, shared);
    step.batch = begin % c.heads / ProblemOf(shared, step).q_heads;
    step.head = begin % c.heads % ProblemOf(shared, step).q_heads;
    while (step.left > 0 && !SeesAny(work, step, shared)) MoveHead(work, 0, shared, step);
    return step;
  }
  // `place` is the one for the descriptor of the next part.
  ATTN_HD static void MoveHead(const Work& work, int place, Shared& shared, Step& step) {
    const ProblemDesc& problem = ProblemOf(shared, step);
    step.slab = 0;
    if (--step.left == 0 || ++step.head < problem.q_heads) return;
    step.head = 0;
    if (++step.batch < problem.batch_count) return;
    step.batch = 0;
    step.place = place;
    ++step.part;
    BringPart(work, step, shared);
  }
  ATTN_HD static bool IsLast(const Shared& shared, const Step& step) {
    return (step.slab + 1) * kSlabChunks >= ProblemOf(shared, step).qk_chunks;
  }
  ATTN_HD static Step Next(const Work& work, Step step, Shared& shared) {
    if (!IsLast(shared, step)) {
      ++step.slab;
      return step;
    }
    const int place = step.place ^ 1;
    do {
      MoveHead(work, place, shared, step);
    } while (step.left > 0 && !SeesAny(work, step, shared));
    return step;
  }
  // Tells whether a row of the block may see a key of it.
  ATTN_HD static bool SeesAny(const Work& work, const Step& step, const Shared& shared) {
    const SequenceDesc& s = SequenceOf(shared, step);
    const Range keys = VisibleKeys(VisibilityOf(s), work.row, work.row + kCaptureRows);
    if (MaxInt(keys.begin, work.key) >= MinInt(keys.end, work.key + kTileKeys)) return false;
    const TileLists& lists = ProblemOf(shared, step).tile_lists;
    if (lists.lines == nullptr) return true;
    const MaskLine line = LineOf(lists, step.batch, step.head, work.row / kCaptureRows);
    if (lists.line_tiles == 1) return line.begin < line.end;
    const int first = work.key / lists.tile_keys;
    return FirstListed(lists.tiles, line.begin, line.end, first) <
           FirstListed(lists.tiles, line.begin, line.end, first + kTileKeys / lists.tile_keys);
  }

  ATTN_HD static void AddHeads(const Work& work, Step step, Shared& shared, Sums& sums) {
    if (step.left == 0) return;
    typename Products::Staging staging;
    float offset;
    Begin(work, step, shared, shared.buffers[0], staging, offset);
    End(work, shared.buffers[0], staging, offset);
    ptx::SyncThreads();
    Scores rS;
    Products::Clear(rS);
    for (int n = 0;; n ^= 1) {
      const Step next = Next(work, step, shared);
      const bool goes_on = next.left > 0;
      if (goes_on) Begin(work, next, shared, shared.buffers[n ^ 1], staging, offset);
      const ProblemDesc& problem = ProblemOf(shared, step);
      Products::Multiply(shared.buffers[n].q, work.warp_row, shared.buffers[n].k, work.warp_key,
                         problem.qk_chunks - step.slab * kSlabChunks, work.lane, rS);
      if (IsLast(shared, step)) {
        AddProbabilities(work, step, shared, shared.buffers[n].offset, rS, sums);
        Products::Clear(rS);
      }
      if (!goes_on) return;
      End(work, shared.buffers[n ^ 1], staging, offset);
      step = next;
      ptx::SyncThreads();
    }
  }

  // ---- A slab on its way.
  ATTN_HD static void Begin(const Work& work, const Step& step, const Shared& shared,
                            Buffer& buffer, typename Products::Staging& staging, float& offset) {
    const ProblemDesc& p = ProblemOf(shared, step);
    const SequenceDesc& s = SequenceOf(shared, step);
    const int slab = step.slab * kSlabBytes;
    const SlabRows q = {RowOf(p.q, s.batch, step.head, int64_t{s.q_begin} + work.row) + slab,
                        static_cast<int>(p.q.row_stride * 2), s.q_len - work.row};
    const SlabRows k = {
        RowOf(p.k, s.batch, step.head / p.group, int64_t{s.kv_begin} + work.key) + slab,
        static_cast<int>(p.k.row_stride * 2), s.kv_len - work.key};
    Products::template Begin<kTileKeys>(q, k, p.qk_chunks - step.slab * kSlabChunks, work.thread,
                                        buffer.q, buffer.k, staging);
    if (work.thread >= kCaptureRows) return;
    offset = Infinity();
    const float* lse =
        p.lse + s.batch * p.lse_batch + step.head * p.lse_head + s.q_begin + work.row;
    ptx::LoadConstantFloatIf(offset, lse + work.thread, work.thread < s.q_len - work.row);
  }
  ATTN_HD static void End(const Work& work, Buffer& buffer, typename Products::Staging& staging,
                          float offset) {
    Products::template End<kTileKeys>(work.thread, buffer.q, buffer.k, staging);
    if (work.thread >= kCaptureRows) return;
    ptx::StoreSharedFloat(&buffer.offset[work.thread],
                          offset == -Infinity() ? Infinity() : offset * kLog2E);
  }

  // ---- Probabilities.
  ATTN_HD static void AddProbabilities(const Work& work, const Step& step, const Shared& shared,
                                       const float* offsets, Scores& rS, Sums& sums) {
    const ProblemDesc& problem = ProblemOf(shared, step);
    const SequenceDesc& sequence = SequenceOf(shared, step);
    const ScoreContext at = {problem, sequence, step.batch, step.head,
                             GeneralScores::OptionsOf(problem)};
    const int row = work.row + work.warp_row, key = work.key + work.warp_key;
    const Range all = KeysVisibleToAll(VisibilityOf(sequence), row,
                                       MinInt(row + kWarpRows, MaxInt(row + 1, sequence.q_len)));
    const bool is_cut = key < all.begin || key + kWarpKeys > all.end;
    float multiplier = problem.scale_log2;
    if (ptx::VoteAny(is_cut || at.options != 0 || problem.tile_lists.lines != nullptr)) {
      ApplyRule(work, at, is_cut, rS);
      multiplier = kLog2E;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int own = work.warp_row + u / 2 * 32 + Products::Place(u & 1, n, work.lane).row;
        const float offset = ptx::LoadSharedFloat(&offsets[own]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          sums[u][n][c] += ptx::Exp2(ptx::Fma(Products::Score(rS, u, n, c), multiplier, -offset));
        }
      }
    }
  }

  // Products become scores in natural units, −∞ where hidden. [warp]
  ATTN_HD static void ApplyRule(const Work& work, const ScoreContext& at, bool is_cut, Scores& rS) {
    const int row = work.row + work.warp_row, key = work.key + work.warp_key;
    MaskLookup mask(at.problem.tile_lists, at.batch, at.head);
    const TileLists& lists = at.problem.tile_lists;
    uint32_t shown = ~0u;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if ((u & 1) == 0 && lists.lines != nullptr) {
        shown = ShownOfSquare(mask, lists, row + u / 2 * 32, key, work.lane);
      }
      ScorePlace pairs[kPairs];
      float scores[kPairs][2], slopes[kPairs][2];
      const int lane = ptx::Keep(work.lane);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const ScorePlace in_square = Products::Place(u & 1, n, lane);
        pairs[n] = {row + u / 2 * 32 + in_square.row, key + in_square.key};
        scores[n][0] = Products::Score(rS, u, n, 0);
        scores[n][1] = Products::Score(rS, u, n, 1);
      }
      const uint32_t visible = GeneralScores::ApplyAll<Along::kKeys>(
          at, pairs, is_cut, shown >> 16 * (u & 1), scores, slopes);
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        Products::Score(rS, u, n >> 1, n & 1) =
            visible >> n & 1 ? scores[n >> 1][n & 1] : -Infinity();
      }
    }
  }
  // A lane's word of the square at (row, key).
  ATTN_HD static uint32_t ShownOfSquare(MaskLookup& mask, const TileLists& lists, int row, int key,
                                        int lane) {
    const int row_tile = row / kCaptureRows, key_tile = key / lists.tile_keys;
    const int64_t entry = mask.TileEntry(row_tile, key_tile);
    if (entry < 0) return entry == MaskLookup::kAll ? ~0u : 0u;
    return ptx::LoadConstant32(
        lists.bitmaps + entry * BitmapWords(kCaptureRows, lists.tile_keys) +
        SquareOf(row - row_tile * kCaptureRows, key - key_tile * lists.tile_keys, lists.tile_keys) +
        lane);
  }

  ATTN_HD static void Write(const Work& work, float* to, const Sums& sums) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const ScorePlace in_square = Products::Place(u & 1, n, work.lane);
        const int row = work.warp_row + u / 2 * 32 + in_square.row;
        ptx::StoreGlobal64(
            to + row * kTileKeys + work.warp_key + in_square.key,
            make_uint2(ptx::FloatBits(sums[u][n][0]), ptx::FloatBits(sums[u][n][1])));
      }
    }
  }
};

}  // namespace attnd
