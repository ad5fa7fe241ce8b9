// Exact attention for one tile of queries, in one pass over K and V.
//   S = scale·Q·Kᵀ, masked      P = softmax(S)      O = (P∘Z)·V      lse = m + log(l)
// Each of four warps has 32 queries (16 of wide heads) of its own: scores, probabilities and output
// stay in its registers, and the accumulators of S are the operand of P·V as they stand. K and V
// come by cp.async, V under the scores of its keys, the next K under P·V; two blocks an SM fill
// what waits are left. Of small tiles (KernelRow::small) a block is one such warp, and many fill
// them.
// Inputs    float16, bfloat16 or float32; rows as kernels/rules/params.h says. Errors: none.
// Rows      with no visible key give O = 0 and lse = −inf. What an invisible V row holds never
//           reaches O: rows beyond the sequence are zero, and in PARTIAL tiles infinities and NaN
//           become zero; NonFiniteValues puts them into O where they are visible.
// Source    Dao 2023 (FlashAttention-2), Algorithm 1; docs/KERNELS.md has figures and what lost.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/restore_non_finite.h"
#include "kernels/sm80/float_math.h"
#include "kernels/sm80/forward_rows.h"
#include "kernels/sm80/forward_visits.h"
#include "kernels/sm80/pipeline.h"

namespace attnd::sm80 {

template <class Math, Tile kTile, class Rule, class DropoutPolicy>
struct ForwardKernel {
  static constexpr int kBlockRows = kTile.q_rows, kKeys = kTile.kv_rows;
  static constexpr bool kSmall = kBlockRows == 32;
  static constexpr int kWarps = kSmall ? 1 : 4, kThreads = kWarps * kWarpLanes;
  static constexpr int kRowTiles = kBlockRows / (kUnitRows * kWarps);  // of a warp
  static constexpr int kWarpRows = kUnitRows * kRowTiles;
  static constexpr int kUnits = kKeys / kUnitColumns, kGroups = kKeys / 8;
  static constexpr int kColumnGroups = kTile.head_dim / 8;
  static constexpr int kChunks = kTile.head_dim * Math::kBytes / 16, kPitch = PitchOf(kChunks);
  static constexpr bool kSplits = Math::kBytes == 4;  // operands: float_math.h
  static constexpr bool kKeepsQueries =
      !kSplits && !kSmall && kTile.head_dim <= 64;  // in registers
  static_assert((kRowTiles == 1 || kRowTiles == 2) && kKeys % kUnitColumns == 0);

  using Visits = KeyVisits<Rule>;
  struct alignas(128) Shared {
    uint4 q[kBlockRows * kPitch];  // at the end O
    uint4 k[kKeys * kPitch];
    uint4 v[kKeys * kPitch];
    Descriptors descriptors;
    int left_out;  // whether an infinity or NaN of a PARTIAL tile of V was left out
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared.descriptors);
    if (at.thread == 0) ptx::StoreShared32(&shared.left_out, 0);
    ptx::SyncThreads();
    const ProblemDesc& problem = shared.descriptors.problem;
    const SequenceDesc& sequence = shared.descriptors.sequence;
    const int first_row = tile.tile * kBlockRows;
    const int end_row = MinInt(first_row + kBlockRows, sequence.q_len);
    Work work = {{problem, sequence, tile.batch, tile.head, Rule::OptionsOf(problem)},
                 Visits(problem, sequence, tile, first_row, end_row, kKeys),
                 first_row,
                 at.thread,
                 at.thread & (kWarpLanes - 1),
                 (at.thread >> 5) * kWarpRows};
    if (work.tiles.count() == 0) {
      WriteEmptyRows(work);
    } else {
      Attend(work, shared);
    }
  }

 private:
  struct Work {
    ScoreContext at;
    Visits tiles;
    int block_row;  // the block's first
    int thread, lane;
    int warp_row;  // the warp's first, within the block
    ATTN_HD int row() const { return block_row + warp_row; }
  };
  using Rows = ForwardRows<Math, Rule, DropoutPolicy, kRowTiles, kGroups>;
  using Scores = typename Rows::Scores;
  using Probabilities = typename Rows::Probabilities;
  using Output = float[kRowTiles][kColumnGroups][4];
  using Queries = uint4[kRowTiles][kKeepsQueries ? kChunks / 2 : 1];
  using Copier = RowCopier<kKeys, kChunks, kPitch, kThreads>;

  ATTN_HD static Copier CopierOf(const Work& work, const RowTensor& t, int live_chunks) {
    const SequenceDesc& s = work.at.sequence;
    return Copier(RowOf(t, s.batch, work.at.head / work.at.problem.group, s.kv_begin),
                  t.row_stride * 2, s.kv_len, live_chunks, work.thread);
  }
  ATTN_HD static void CopyQueries(const Work& work, Shared& shared) {
    const ProblemDesc& p = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const RowCopier<kBlockRows, kChunks, kPitch, kThreads> copier(
        RowOf(p.q, s.batch, work.at.head, s.q_begin), p.q.row_stride * 2, s.q_len, p.qk_chunks,
        work.thread);
    copier.Copy(work.block_row, shared.q);
  }

  ATTN_HD static void Attend(Work& work, Shared& shared) {
    const ProblemDesc& problem = work.at.problem;
    const Copier keys = CopierOf(work, problem.k, problem.qk_chunks);
    const Copier values = CopierOf(work, problem.v, problem.v_chunks);
    CopyQueries(work, shared);
    keys.Copy(work.tiles.Here().First(), shared.k);
    ptx::CommitCopies();
    const DropoutPolicy dropout(work.at);
    const float multiplier = Rule::Multiplier(problem);
    typename Rows::State rows;
    Rows::Clear(work.row(), work.at.sequence.q_len, work.lane, rows);
    Output rO;
    Clear(rO);
    Queries rQ;
    const int count = work.tiles.count();
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const auto visit = work.tiles.Here();
      ptx::WaitForCopies<0>();
      ptx::SyncThreads();  // K is there, and all are done with V
      values.Copy(visit.First(), shared.v);
      ptx::CommitCopies();
      uint32_t shown[kUnits];
      LoadShown(work, visit, shown);
      if (kKeepsQueries && n == 0) LoadQueries(work, shared, rQ);
      Scores rS;
      Multiply(work, shared, rQ, rS);
      if (Rule::kEveryTile || visit.IsPartial()) {
        Rows::ApplyRule(work.at, visit, work.row(), work.lane, shown,
                        kRowTiles == 1 ? work.warp_row & 16 : 0, rS, rows);
      }
      typename Rows::Factors factors;
      if (Rows::Grow(rS, multiplier, rows, factors)) Rows::Rescale(factors, rO);
      Rows::MakeP(multiplier, rows, rS);
      Probabilities rP;
      Rows::Pack(rS, dropout, work.row(), visit.First(), work.lane, rP);
      ptx::WaitForCopies<0>();
      ptx::SyncThreads();  // V is there, and all are done with K
      if (n + 1 < count) keys.Copy(work.tiles.NextFirst(), shared.k);
      ptx::CommitCopies();
      if (visit.IsPartial()) LeaveOut(work, shared);
      AddValues(work, shared, rP, rO);
      work.tiles.Advance();
    }
    Finish(work, rows, rO, shared);
  }

  ATTN_HD static void Clear(Output& rO) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnGroups * 4; ++n) rO[m][n >> 2][n & 3] = 0;
    }
  }

  // ---- Scores.
  ATTN_HD static uint4 Query(const Work& work, const Shared& shared, int m, int chunk) {
    const LanePlace place = LanePlace::OfA(work.lane);
    const int offset = ChunkOffset<kPitch>(work.warp_row + place.row, place.chunk);
    return ptx::LoadMatrices(At(shared.q, Moved<kPitch>(offset, m * kUnitRows, chunk)));
  }
  ATTN_HD static void LoadQueries(const Work& work, const Shared& shared, Queries& rQ) {
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int c = 0; c < kChunks / 2; ++c) rQ[m][c] = Query(work, shared, m, 2 * c);
      }
    }
  }
  ATTN_HD static void Multiply(const Work& work, const Shared& shared, const Queries& rQ,
                               Scores& rS) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kGroups * 4; ++n) rS[m][n >> 2][n & 3] = 0;
    }
    Scores first = {};  // of float32: the sums over the first half of a wide head
    const LanePlace place = LanePlace::OfColumns(work.lane);
    const int offset = ChunkOffset<kPitch>(place.row, place.chunk);
#pragma unroll(kSplits ? 2 : kChunks / 2)
    for (int c = 0; c < kChunks / 2; ++c) {
      uint32_t a[kRowTiles][Math::kOperandWords];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Math::ToOperand(
            kKeepsQueries ? rQ[m][kKeepsQueries ? c : 0] : Query(work, shared, m, 2 * c), a[m]);
      }
#pragma unroll
      for (int x = 0; x < kGroups / 2; ++x) {
        const uint4 b = ptx::LoadMatrices(At(shared.k, Moved<kPitch>(offset, x * 16, 2 * c)));
        Math::Multiply(rS, 2 * x, a, b);
      }
      if constexpr (kSplits && kTile.head_dim > 64) {
        if (c == kChunks / 4 - 1) Math::Fold(rS, first);
      }
    }
    if constexpr (kSplits && kTile.head_dim > 64) Math::Fold(first, rS);
    if constexpr (kSplits) {
      Math::template Repair<kPitch, kChunks>(
          shared.q, shared.k,
          [&](int m, int group, int e) {
            return
                typename Math::Rows{work.warp_row + m * kUnitRows + Accumulator::Row(e, work.lane),
                                    group * 8 + Accumulator::Col(e, work.lane)};
          },
          rS);
    }
  }

  template <class Visit>
  ATTN_HD static void LoadShown(const Work& work, const Visit& visit, uint32_t (&shown)[kUnits]) {
    if constexpr (Rule::kListed) {
      const int square = SquareOf(work.warp_row, 0, kKeys);
      Rows::LoadShown(
          ptx::Offset(work.at.problem.tile_lists.bitmaps + square + work.lane,
                      static_cast<int>(work.tiles.Bitmap()), BitmapWords(kBlockRows, kKeys) * 4),
          visit.IsMasked(), shown);
    }
  }

  // ---- Output.
  ATTN_HD static void LeaveOut(const Work& work, Shared& shared) {
    if (LeaveOutNonFinite<Math, kKeys, kChunks, kPitch, kThreads>(shared.v, work.thread)) {
      ptx::StoreShared32(&shared.left_out, 1);
    }
    ptx::SyncThreads();
  }

  ATTN_HD static void AddValues(const Work& work, const Shared& shared, const Probabilities& rP,
                                Output& rO) {
    if constexpr (kSplits) {
#pragma unroll
      for (int y = 0; y < kGroups; y += 2) {
        uint32_t a[2][kRowTiles][Math::kOperandWords];
#pragma unroll
        for (int n = 0; n < 2 * kRowTiles; ++n) {
          Math::ProbabilityOperand(rP[n >> 1][y + (n & 1)], a[n & 1][n >> 1]);
        }
        Math::template AddRows<kPitch>(a, shared.v, y * 8, work.lane, rO);
      }
    } else {
      AddHalfValues(work, shared, rP, rO);
    }
  }
  ATTN_HD static void AddHalfValues(const Work& work, const Shared& shared, const Probabilities& rP,
                                    Output& rO) {
    const LanePlace place = LanePlace::OfRows(work.lane);
    const int offset = ChunkOffset<kPitch>(place.row, place.chunk);
#pragma unroll
    for (int y = 0; y < kGroups / 2; ++y) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        a[m][0] = rP[m][2 * y][0];
        a[m][1] = rP[m][2 * y][1];
        a[m][2] = rP[m][2 * y + 1][0];
        a[m][3] = rP[m][2 * y + 1][1];
      }
#pragma unroll
      for (int c = 0; c < kChunks / 2; ++c) {
        const uint4 b =
            ptx::LoadMatricesTransposed(At(shared.v, Moved<kPitch>(offset, y * 16, 2 * c)));
        Math::Multiply(rO, 2 * c, a, b);
      }
    }
  }

  ATTN_HD static void Finish(const Work& work, const typename Rows::State& rows, Output& rO,
                             Shared& shared) {
    Rows::Finish(work.at, rows, work.row(), work.lane, work.tiles.count(), rO);
    WriteOutput(work, rO, shared);
    ptx::SyncThreads();  // all of left_out is known, and all of the block's O is written
    if (ptx::LoadShared32(&shared.left_out)) RestoreRow(work);
  }
  // Through the warp's own rows of Q, so that whole chunks leave.
  ATTN_HD static void WriteOutput(const Work& work, const Output& rO, Shared& shared) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    if constexpr (Rule::kListed && !kSplits) {
      if (IsRun(problem)) return WriteRun(work, rO);
    }
    ptx::SyncWarp();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.warp_row + m * kUnitRows + Accumulator::Row(2 * r, work.lane);
#pragma unroll
        for (int c = 0; c < kColumnGroups; ++c) PutOutput(work, row, c, 2 * r, rO[m][c], shared.q);
      }
    }
    ptx::SyncWarp();
    const char* first = RowOf(problem.o, s.batch, work.at.head, s.q_begin);
    const int row_bytes = static_cast<int>(problem.o.row_stride * 2);
#pragma unroll
    for (int n = 0; n < kWarpRows * kChunks; n += kWarpLanes) {
      const int place = n + work.lane, chunk = place % kChunks;
      const int row = work.warp_row + place / kChunks;
      if (work.block_row + row >= s.q_len || chunk >= problem.v_chunks) continue;
      char* out = const_cast<char*>(ptx::Offset(first, work.block_row + row, row_bytes));
      ptx::StoreGlobal128(out + chunk * 16,
                          ptx::LoadShared128(At(shared.q, ChunkOffset<kPitch>(row, chunk))));
    }
  }
  ATTN_HD static void WriteRun(const Work& work, const Output& rO) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    char* const first = RowOf(problem.o, s.batch, work.at.head, s.q_begin);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.row() + m * kUnitRows + Accumulator::Row(2 * r, work.lane);
        if (row >= s.q_len) continue;
#pragma unroll
        for (int c = 0; c < kColumnGroups; ++c) {
          if (c >= problem.v_chunks) continue;
          StorePair(first + row * problem.o.row_stride * 2, c * 8 + (work.lane & 3) * 2,
                    rO[m][c][2 * r], rO[m][c][2 * r + 1]);
        }
      }
    }
  }
  // Elements e and e + 1 of group c of the columns.
  ATTN_HD static void PutOutput(const Work& work, int row, int c, int e, const float (&sums)[4],
                                void* to) {
    if constexpr (kSplits) {
#pragma unroll
      for (int n = e; n < e + 2; ++n) {
        const int column = Math::template Column<kColumnGroups>(c, n, work.lane);
        ptx::StoreShared32(At(to, NumberOffset<kPitch>(row, column)), ptx::FloatBits(sums[n]));
      }
    } else {
      ptx::StoreShared32(At(to, ChunkOffset<kPitch>(row, c) + (work.lane & 3) * 4),
                         Math::Pack(sums[e], sums[e + 1]));
    }
  }
  ATTN_HD static void RestoreRow(const Work& work) {
    const int row = work.block_row + work.thread;
    if (work.thread >= kBlockRows || row >= work.at.sequence.q_len) return;
    NonFiniteValues<Math, Rule, DropoutPolicy::kDrops>::Restore(work.at, work.tiles, kKeys, row);
  }

  // No key is visible to any row of this tile.
  ATTN_HD static void WriteEmptyRows(const Work& work) {
    const ProblemDesc& problem = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const int row = work.block_row + work.thread;
    if (work.thread >= kBlockRows || row >= s.q_len) return;
    ptx::StoreGlobalFloat(problem.lse + s.batch * problem.lse_batch +
                              work.at.head * problem.lse_head + s.q_begin + row,
                          -Infinity());
    if (IsRun(problem)) return;  // such rows of its O are not read
    char* out = RowOf(problem.o, s.batch, work.at.head, s.q_begin + row);
    for (int c = 0; c < problem.v_chunks; ++c) {
      ptx::StoreGlobal128(out + c * 16, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace attnd::sm80
