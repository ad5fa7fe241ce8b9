// The output role of a forward block: O = (P∘Z)·V, and bringing K and V (of small tiles V alone).
// Each of its warps has its part of O in registers. `L`: ForwardLayout. Errors: none.
#pragma once

#include "kernels/ptx/mma_sm70.h"
#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/restore_non_finite.h"
#include "kernels/sm70/forward_layout.h"
#include "kernels/sm70/forward_rows.h"

namespace attnd::sm70 {

template <class L>
class OutputRole {
 public:
  using Work = typename L::Work;
  using Shared = typename L::Shared;

  // The role's own warps call it.
  ATTN_HD static void Run(Work work, Shared& shared) {
    OutputTiles rO, rTotal;  // of the last steps and, of split numbers, of those before
    Clear(rO);
    if constexpr (L::kSplits) Clear(rTotal);
    Stagers stagers(work);
    OwnRows<L, true> values(work);
    if constexpr (L::kOwnTiles) values.Open(work, shared);
    const int count = work.tiles.count();
    if constexpr (!L::kOwnTiles) {
      stagers.FetchKeys(work, 0);
      stagers.FetchValues(work, 0);
      stagers.PutKeys(0, shared);
      stagers.PutValues(work, 0, 0, shared);
      stagers.FetchKeys(work, 1);
      stagers.FetchValues(work, 1);
    }
    DropoutPolicy dropout(work.at, work.score_row(), work.lane.index);
    int words = ptx::Keep(work.warp * Words::kWarp + work.lane.index * 8);
    dropout.template Store<Words>(L::At(&shared.keep, words, 0), work.tiles.At(0).First());
    Operands operands(work);
    const int turn = ptx::Keep(L::kTurn + work.team());
    ptx::SyncThreads();
    int put = L::kTileBytes;  // where the next step's V goes in its ring
    for (int step = 0; step <= count; ++step) {
      if (step > 0) ptx::BarrierSync(L::kKeysRead + ((step - 1) & 1), L::kThreads);
      words ^= Words::kStep;
      if (step + 1 < count) {
        if constexpr (!L::kOwnTiles) {
          stagers.PutKeys(step + 1, shared);
          stagers.PutValues(work, step + 1, put, shared);
        }
        dropout.template Store<Words>(L::At(&shared.keep, words, 0),
                                      work.tiles.At(step + 1).First());
      }
      if constexpr (!L::kOwnTiles) {
        put = NextStep(put);
        stagers.FetchKeys(work, step + 2);
        stagers.FetchValues(work, step + 2);
      }
      // The last group of the step before, then the first of this one.
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        if (step < count) ptx::BarrierSync(turn + n * L::kTeams, L::kTurnThreads);
        if (n == 1 && step + 1 < count) {
          ptx::BarrierArrive(L::kKeysReady + ((step + 1) & 1), L::kThreads);
        }
        const int group = 2 * step + n - 1;
        if (group >= 0 && group < 2 * count) {
          AddGroup(work, group, operands, shared, rO, rTotal);
          if constexpr (L::kOwnTiles) values.Advance(work, group, shared);
        }
      }
      if (L::FoldsAfter(step)) Fold(rO, rTotal);
    }
    if constexpr (L::kSplits) Fold(rTotal, rO);
    ptx::SyncThreads();  // end_factor is there
    WriteOutput(work, shared, rO);
    if (ptx::LoadShared32(&shared.left_out)) {
      ptx::BarrierSync(L::kOutputOnly, L::kRoleThreads);  // all of the block's O is written
      RestoreNonFinite(work);
    }
  }

 private:
  using Rule = typename L::ScoreRule;
  using DropoutPolicy = typename L::Dropout;
  using Words = typename L::Words;

  static constexpr int kOutputTiles = L::kOutputChunks / (L::kSplits ? 4 : 2);
  using OutputTiles = float[L::kTeamTiles][kOutputTiles][8];

  ATTN_HD static void Clear(OutputTiles& rO) {
#pragma unroll
    for (int n = 0; n < L::kTeamTiles * kOutputTiles; ++n) {
      Float32Accumulate::Zero(rO[n / kOutputTiles][n % kOutputTiles]);
    }
  }
  ATTN_HD static void Fold(OutputTiles& from, OutputTiles& to) {
#pragma unroll
    for (int n = 0; n < L::kTeamTiles * kOutputTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        to[n / kOutputTiles][n % kOutputTiles][e] += from[n / kOutputTiles][n % kOutputTiles][e];
        from[n / kOutputTiles][n % kOutputTiles][e] = 0;
      }
    }
  }

  static constexpr int kStaged = L::kChunks & (L::kChunks - 1) ? L::kPitch : L::kChunks;
  template <int kFirst>
  using TileStager = RowStager<kStaged, L::kRoleThreads, L::kPitch, kFirst>;
  template <int kFirst>
  ATTN_HD static TileStager<kFirst> Stager(const Work& work, const RowTensor& t, int live_chunks) {
    const SequenceDesc& s = work.at.sequence;
    int kv_head = work.at.head / work.at.problem.group;
    return TileStager<kFirst>(RowOf(t, s.batch, kv_head, s.kv_begin),
                              static_cast<int>(t.row_stride * 2), s.kv_len, live_chunks,
                              work.thread);
  }
  // Returns where a step's V goes after the one at `put`: steps of split numbers may lie across the
  // end.
  static constexpr int kRing = L::kValueRing * L::kGroupBytes;
  ATTN_HD static int NextStep(int put) {
    if constexpr (L::kValueRing % L::kGroups == 0) {
      return put == kRing - L::kTileBytes ? 0 : put + L::kTileBytes;
    } else {
      return put + L::kTileBytes - (put >= kRing - L::kTileBytes ? kRing : 0);
    }
  }
  ATTN_HD static int NextFetch(const Work& work, int step) {
    return work.tiles.At(MinInt(step, work.tiles.count() - 1)).First();
  }
  struct Stagers {
    TileStager<0> k;
    TileStager<L::kValueChunk> v;
    ATTN_HD explicit Stagers(const Work& work)
        : k(Stager<0>(work, work.at.problem.k, work.at.problem.qk_chunks)),
          v(Stager<L::kValueChunk>(work, work.at.problem.v, work.at.problem.v_chunks)) {}
    ATTN_HD void FetchKeys(const Work& work, int step) { k.Fetch(NextFetch(work, step)); }
    ATTN_HD void FetchValues(const Work& work, int step) { v.Fetch(NextFetch(work, step)); }
    ATTN_HD void PutKeys(int step, Shared& shared) const {
      k.Put(shared.k, (step & 1) * L::kTileBytes);
    }
    ATTN_HD void PutValues(const Work& work, int step, int offset, Shared& shared) const {
      const auto visit = work.tiles.At(step);
      // Split numbers take this path always: infinities would meet low parts, which may be zero.
      if (!L::kSplits && !visit.IsPartial()) {
        v.Put(shared.v(), offset);
        return;
      }
      const int jump = L::kSplits && offset == kRing - L::kGroupBytes ? -kRing : 0;
      constexpr bool kSeldom = Rule::kListed || L::kSplits;
      if (v.template PutFinite<kSeldom>(shared.v(), offset, jump, visit.First())) {
        ptx::StoreShared32(&shared.left_out, 1);
      }
    }
  };

  static constexpr int kOtherKeys = ChunkOffset(4, 0, L::kPitch);  // four rows on, twist included
  // Byte offsets of this lane's operands of the group at hand.
  struct Operands {
    int line;  // of P: the own column half's keys; ^ L::kOtherHalf: the other's
    int row;   // of V, within the group: key of k step 0, the lane's chunk; ^ kOtherKeys likewise
    int p, v;  // of the group in the rings

    ATTN_HD explicit Operands(const Work& work) : p(0), v(0) {
      const int chunk = L::kValueChunk + work.lane.column_half() * 2 + work.lane.upper();
      line = ptx::Keep(ReaderLine(work));
      const int column = work.part() * L::kOutputChunks * 16;
      row = ptx::Keep(ChunkOffset(work.lane.ValueKey(0, 0), chunk, L::kPitch) + column);
    }
    ATTN_HD void Next() {
      p = (p + L::kTeams * L::kPBytes) & (L::kPRing * L::kTeams * L::kPBytes - 1);
      v = v == (L::kValueRing - 1) * L::kGroupBytes ? 0 : v + L::kGroupBytes;
    }
  };

  ATTN_HD static void AddGroup(const Work& work, int group, Operands& at, const Shared& shared,
                               OutputTiles& rO, OutputTiles& rTotal) {
    const int slot = group & (L::kPRing - 1);
#pragma unroll
    for (int n = 0; n < L::kTeamWarps; ++n) {
      const int warp = work.team() * L::kTeamWarps + n;
      if (ptx::LoadShared32(&shared.grown[slot][warp]) == static_cast<uint32_t>(group + 1)) {
        const Lane lane = {ptx::Keep(work.lane.index)};
        RescaleOutput(shared.factor[slot][warp], n * L::kRowTiles, lane, rO);
        if constexpr (L::kSplits) {
          RescaleOutput(shared.factor[slot][warp], n * L::kRowTiles, lane, rTotal);
        }
      }
    }
#pragma unroll L::kUnrolled
    for (int half = 0; half < 2; ++half) {
      if constexpr (L::kSplits) {
        AddSplitPV(shared.p, at.p + at.line, shared.v(), at.v + at.row, rO);
      } else {
        AddPV(shared.p, at.p + at.line, shared.v(), at.v + at.row, rO);
      }
      at.line ^= L::kOtherHalf;
      at.row ^= kOtherKeys;
    }
    at.Next();
  }

  // Split numbers, whose sums of a half are added outside the tensor core. A chunk of V is both
  // parts of four columns.
  ATTN_HD static void AddSplitPV(const void* sP, int line, const void* sV, int row,
                                 OutputTiles& rO) {
    uint4 a[2][L::kTeamTiles];  // [part][tile]
#pragma unroll
    for (int n = 0; n < 2 * L::kTeamTiles; ++n) {
      a[n & 1][n >> 1] = ptx::LoadShared128(
          L::At(sP, line, (n & 1) * L::kPartBytes + (n >> 1) * L::kLineTileBytes));
    }
#pragma unroll
    for (int x = 0; x < kOutputTiles; ++x) {
      uint4 b[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int twist = ((x & 1) * 4) ^ (k * 2);
        b[k] = ptx::LoadShared128(
            L::At(sV, row ^ twist * 16, (x >> 1) * 128 + k * 2 * L::kPitch * 16));
      }
      float sums[L::kTeamTiles][8] = {};
#pragma unroll
      for (int n = 0; n < 6 * L::kTeamTiles; ++n) {  // low by high, high by low, high by high
        const int m = n % L::kTeamTiles, k = n / L::kTeamTiles & 1, which = n / L::kTeamTiles / 2;
        const uint4 of_p = a[which == 0][m], of_v = b[k];
        ptx::MmaRowRow(sums[m], k ? of_p.z : of_p.x, k ? of_p.w : of_p.y,
                       which == 1 ? of_v.z : of_v.x, which == 1 ? of_v.w : of_v.y);
      }
#pragma unroll
      for (int n = 0; n < 8 * L::kTeamTiles; ++n) rO[n >> 3][x][n & 7] += sums[n >> 3][n & 7];
    }
  }

  // Eight keys of each column half: `line` of P, `row` of V as byte offsets.
  ATTN_HD static void AddPV(const void* sP, int line, const void* sV, int row, OutputTiles& rO) {
    uint4 a[L::kTeamTiles];
#pragma unroll
    for (int m = 0; m < L::kTeamTiles; ++m) {
      a[m] = ptx::LoadShared128(L::At(sP, line, m * L::kLineTileBytes));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int n = 0; n < L::kOutputChunks / 4; ++n) {
        // k step 1 is two rows on, which twists by two chunks; n two steps of four chunks.
        const int twist = ((n & 1) * 4) ^ (k * 2);
        uint4 b = ptx::LoadShared128(
            L::At(sV, row ^ twist * 16, (n >> 1) * 128 + k * 2 * L::kPitch * 16));
#pragma unroll
        for (int m = 0; m < L::kTeamTiles; ++m) {
          ptx::MmaRowRow(rO[m][2 * n], k ? a[m].z : a[m].x, k ? a[m].w : a[m].y, b.x, b.y);
        }
#pragma unroll
        for (int m = 0; m < L::kTeamTiles; ++m) {
          ptx::MmaRowRow(rO[m][2 * n + 1], k ? a[m].z : a[m].x, k ? a[m].w : a[m].y, b.z, b.w);
        }
      }
    }
  }

  // The tiles of one score warp, from `first_tile` on.
  ATTN_HD static void RescaleOutput(const float* factor, int first_tile, Lane lane,
                                    OutputTiles& rO) {
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = Float32Accumulate::Row(2 * r, lane.index);
        float f = ptx::LoadSharedFloat(&factor[m * 16 + row]);
#pragma unroll
        for (int x = 0; x < kOutputTiles; ++x) {
#pragma unroll
          for (int c = 0; c < 4; ++c) rO[first_tile + m][x][Float32Accumulate::Element(r, c)] *= f;
        }
      }
    }
  }

  // Chunk of O's row that element e of the n-th four chunks lies in: in turn over the lanes.
  ATTN_HD static int OutputChunk(int n, int e, const Work& work) {
    return work.part() * L::kOutputChunks + n * 4 + work.lane.column_half() * 2 + (e >> 2);
  }

  // Two lanes (n, n ^ 2) hold two rows in halves of a 16-byte chunk: they swap, so that each stores
  // whole chunks of one row.
  ATTN_HD static void WriteOutput(const Work& work, const Shared& shared, const OutputTiles& rO) {
    // In two steps, because one factor alone may lie beyond float32.
    const int exponent = L::kSplits ? work.at.problem.v_exponent : 0;
    const float scale[2] = {PowerOfTwo(exponent / 2), PowerOfTwo(exponent - exponent / 2)};
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const RowTensor o = problem.o;
    const int live_chunks = problem.v_chunks, q_len = s.q_len;
    const int row_bytes = static_cast<int>(o.row_stride * 2);
    const bool second = work.lane.index & 2;
    const bool is_run = Rule::kListed && !L::kSplits && IsRun(problem);
    const char* first = RowOf(o, s.batch, work.at.head, s.q_begin);
#pragma unroll
    for (int m = 0; m < L::kTeamTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int place = m * 16 + Float32Accumulate::Row(2 * r, work.lane.index);
        factor[r] = ptx::LoadSharedFloat(&shared.end_factor[work.team() * L::kTeamRows + place]);
      }
      const int row =
          work.team_row() + m * 16 + Float32Accumulate::Row(second * 2, work.lane.index);
      char* out = const_cast<char*>(ptx::Offset(first, row, row_bytes));
#pragma unroll
      for (int n = 0; n < L::kOutputChunks / 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int chunk = OutputChunk(n, 4 * half, work);
          if (is_run) {
            if (chunk >= live_chunks) continue;
            StoreFloats(rO[m][2 * n], rO[m][2 * n + 1], half, factor, second, row_bytes,
                        q_len - row, out + chunk * 32);
            continue;
          }
          uint4 words;
          if constexpr (L::kSplits) {
            words = SwapFloatRows(rO[m][n], half, factor, scale, second);
          } else {
            words = SwapRows(rO[m][2 * n], rO[m][2 * n + 1], half, factor, second);
          }
          if (row < q_len && chunk < live_chunks) ptx::StoreGlobal128(out + chunk * 16, words);
        }
      }
    }
  }
  // A run's: each lane stores what it has of a chunk. `to`: its second row, or the first one.
  ATTN_HD static void StoreFloats(const float (&low)[8], const float (&high)[8], int half,
                                  const float (&factor)[2], bool second, int row_bytes, int left,
                                  char* to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = Float32Accumulate::Element(r, 2 * half);
      const int rows = (r - second) * Float32Accumulate::Row(2, 0);
      if (rows >= left) continue;
      char* const out = to + rows * row_bytes;
      StorePair(out, second * 2, low[e] * factor[r], low[e + 1] * factor[r]);
      StorePair(out, second * 2 + 4, high[e] * factor[r], high[e + 1] * factor[r]);
    }
  }
  // `low`, `high`: columns 0..3 and 4..7 of the chunk.
  ATTN_HD static uint4 SwapRows(const float (&low)[8], const float (&high)[8], int half,
                                const float (&factor)[2], bool second) {
    uint32_t words[2][2];  // row, low or high
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = Float32Accumulate::Element(r, 2 * half);
      words[r][0] = ptx::PackRounded(low[e] * factor[r], low[e + 1] * factor[r]);
      words[r][1] = ptx::PackRounded(high[e] * factor[r], high[e + 1] * factor[r]);
    }
    uint32_t own0 = second ? words[1][0] : words[0][0], own1 = second ? words[1][1] : words[0][1];
    uint32_t got0 = ptx::ShuffleXor(second ? words[0][0] : words[1][0], 2);
    uint32_t got1 = ptx::ShuffleXor(second ? words[0][1] : words[1][1], 2);
    return second ? make_uint4(got0, own0, got1, own1) : make_uint4(own0, got0, own1, got1);
  }

  // The same of float32, whose chunk is four columns.
  ATTN_HD static uint4 SwapFloatRows(const float (&tile)[8], int half, const float (&factor)[2],
                                     const float (&scale)[2], bool second) {
    uint32_t words[2][2];  // row, column
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = n >> 1, c = n & 1;
      words[r][c] = ptx::FloatBits(tile[Float32Accumulate::Element(r, 2 * half + c)] * factor[r] *
                                   scale[0] * scale[1]);
    }
    uint32_t own0 = second ? words[1][0] : words[0][0], own1 = second ? words[1][1] : words[0][1];
    uint32_t got0 = ptx::ShuffleXor(second ? words[0][0] : words[1][0], 2);
    uint32_t got1 = ptx::ShuffleXor(second ? words[0][1] : words[1][1], 2);
    return second ? make_uint4(got0, got1, own0, own1) : make_uint4(own0, own1, got0, got1);
  }

  // Gives O what PutFinite left out, one row a thread.
  ATTN_HD static void RestoreNonFinite(const Work& work) {
    const int row = work.block_row + work.thread;
    if (work.thread >= L::kBlockRows || row >= work.at.sequence.q_len) return;
    NonFiniteValues<typename L::ScoreMath::Operand, Rule,
                    DropoutPolicy::kDrops>::template Restore<L::kSplits>(work.at, work.tiles,
                                                                         L::kStepKeys, row);
  }

  // Byte offset within slot 0 of P, row tile 0: what this lane reads.
  ATTN_HD static int ReaderLine(const Work& work) {
    const Lane lane = work.lane;
    return work.team() * L::kPBytes +
           L::Line(lane.quad(), lane.row_half(), lane.upper(), lane.column_half()) * 16;
  }
};

}  // namespace attnd::sm70
