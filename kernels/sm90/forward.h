// prototype
#pragma once
#include "kernels/ptx/instructions_sm90.h"
#include "kernels/rules/descriptors.h"
#include "kernels/rules/restore_non_finite.h"
#include "kernels/sm80/forward_rows.h"
#include "kernels/sm80/forward_visits.h"

namespace attnd::sm90 {
using sm80::Accumulator;
using sm80::At;
using sm80::KeyVisits;
using sm80::kUnitColumns;
using sm80::NoDropout;
using sm80::PhiloxDropout;

struct HalfMath : sm80::HalfMath {
  template <int n> ATTN_HD static void Scores(float (&c)[n][4], uint64_t a, uint64_t b, bool adds) { ptx::WgmmaHalf(c, a, b, adds); }
  template <int n> ATTN_HD static void Values(float (&c)[n][4], const uint32_t (&a)[4], uint64_t b) { ptx::WgmmaHalf(c, a, b); }
};

// chunk c of row r in a tile of kRows rows: columns of 128 bytes, one after the other
template <int kRows>
ATTN_HD constexpr int PanelOffset(int row, int chunk) {
  return (chunk >> 3) * kRows * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

template <int kRows, int kChunks, int kThreads>
class PanelCopier {
 public:
  ATTN_HD PanelCopier(const void* data, int64_t row_bytes, int rows, int live_chunks, int thread)
      : row_bytes_(static_cast<int>(row_bytes)), rows_(rows), live_(live_chunks), row_(thread / 8), chunk_(thread % 8) {
    data_ = static_cast<const char*>(data) + chunk_ * 16;
    place_ = PanelOffset<kRows>(row_, chunk_);
  }
  ATTN_HD void Copy(int first_row, void* tile) const {
    char* to = At(tile, place_);
    if (first_row + kRows <= rows_ && live_ == kChunks) {
      const char* from = ptx::Offset(data_, first_row + row_, row_bytes_);
      const int64_t step = int64_t{row_bytes_} * kPass;
#pragma unroll
      for (int n = 0; n < kRows; n += kPass) {
#pragma unroll
        for (int c = 0; c < kChunks; c += 8) ptx::CopyAsync(to + (c / 8) * kRows * 128 + n * 128, from + c * 16, true);
        from += step;
      }
      return;
    }
#pragma unroll 1
    for (int n = 0; n < kRows; n += kPass) {
      const int row = first_row + n + row_;
      const bool exists = row < rows_;
      const char* from = ptx::Offset(data_, exists ? row : 0, row_bytes_);
#pragma unroll
      for (int c = 0; c < kChunks; c += 8) {
        const bool live = exists && c + chunk_ < live_;
        ptx::CopyAsync(to + (c / 8) * kRows * 128 + n * 128, live ? from + c * 16 : from, live);
      }
    }
  }
 private:
  static constexpr int kPass = kThreads / 8;
  const char* data_;
  int row_bytes_, rows_, live_, row_, chunk_, place_;
};

template <class Math, Tile kTile, class Rule, class DropoutPolicy>
struct ForwardKernel {
  static constexpr int kConsumers = kTile.q_rows / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeys = kTile.kv_rows, kChunks = kTile.head_dim / 8, kGroups = kKeys / 8;
  static constexpr int kStages = 2;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  using Rows = sm80::ForwardRows<Math, Rule, DropoutPolicy, 1, kGroups>;
  using Visits = KeyVisits<Rule>;
  struct alignas(1024) Shared {
    uint4 q[kConsumers][64 * kChunks];
    uint4 k[kStages][kKeys * kChunks], v[kStages][kKeys * kChunks];
    uint64_t full_q, empty_q, full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    uint64_t full_work[2], empty_work[2];
    Descriptors descriptors[2];
    TileWork tiles[2];
    int left_out;
  };
  struct Work {
    ScoreContext at;
    Visits tiles;
    int first_row;
  };
  ATTN_HD static Work WorkOf(Shared& shared, int slot) {
    const ProblemDesc& problem = shared.descriptors[slot].problem;
    const SequenceDesc& sequence = shared.descriptors[slot].sequence;
    const TileWork tile = shared.tiles[slot];
    const int first_row = tile.tile * kTile.q_rows;
    const int end_row = MinInt(first_row + kTile.q_rows, sequence.q_len);
    return {{problem, sequence, tile.batch, tile.head, Rule::OptionsOf(problem)},
            Visits(problem, sequence, tile, first_row, end_row, kKeys), first_row};
  }
  // Where a role stands: tiles and visits so far.
  struct Place {
    uint32_t tile = 0, visit = 0;
  };
  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    if (at.thread == 0) {
      ptx::StoreShared32(&shared.left_out, 0);
      ptx::InitBarrier(&shared.full_q, 128);
      ptx::InitBarrier(&shared.empty_q, 4 * kConsumers);
      for (int n = 0; n < 2; ++n) {
        ptx::InitBarrier(&shared.full_work[n], 128);
        ptx::InitBarrier(&shared.empty_work[n], 4 * kConsumers);
      }
      for (int n = 0; n < kStages; ++n) {
        ptx::InitBarrier(&shared.full_k[n], 128);
        ptx::InitBarrier(&shared.full_v[n], 128);
        ptx::InitBarrier(&shared.empty_k[n], 4 * kConsumers);
        ptx::InitBarrier(&shared.empty_v[n], 4 * kConsumers);
      }
      ptx::FenceBarriers();
    }
    ptx::SyncThreads();
    const int group = __shfl_sync(~0u, at.thread >> 7, 0);
    Place place;
    if (group == 0) {
      ptx::KeepRegisters<kProducerRegisters>();
#pragma unroll 1
      for (int n = at.block; n < params.tile_count; n += gridDim.x, ++place.tile) {
        const int slot = place.tile & 1;
        ptx::WaitFor(&shared.empty_work[slot], ((place.tile >> 1) & 1) ^ 1);
        const TileWork tile = params.tiles[n];
        BringDescriptors(params, tile, at.thread, 128, shared.descriptors[slot]);
        if (at.thread == 0) shared.tiles[slot] = tile;
        ptx::Arrive(&shared.full_work[slot]);
        ptx::WaitFor(&shared.full_work[slot], (place.tile >> 1) & 1);
        Work work = WorkOf(shared, slot);
        Produce(work.at, work.tiles, work.first_row, at.thread, place, shared);
      }
    } else {
      ptx::TakeRegisters<kConsumerRegisters>();
      const int w = group - 1;
#if PP
      if (w == kConsumers - 1) ptx::BarrierArrive(1, 256);
#endif
#pragma unroll 1
      for (int n = at.block; n < params.tile_count; n += gridDim.x, ++place.tile) {
        const int slot = place.tile & 1;
        ptx::WaitFor(&shared.full_work[slot], (place.tile >> 1) & 1);
        Work work = WorkOf(shared, slot);
        Consume(work.at, work.tiles, work.first_row, w, at.thread & 127, place, shared);
        if ((at.thread & 31) == 0) ptx::Arrive(&shared.empty_work[slot]);
      }
    }
  }

  ATTN_HD static void Produce(const ScoreContext& at, Visits& tiles, int first_row, int thread, Place& place, Shared& shared) {
    const ProblemDesc& p = at.problem;
    const SequenceDesc& s = at.sequence;
    using Copier = PanelCopier<kKeys, kChunks, 128>;
    ptx::WaitFor(&shared.empty_q, (place.tile & 1) ^ 1);
    {
      const PanelCopier<64, kChunks, 128> queries(RowOf(p.q, s.batch, at.head, s.q_begin), p.q.row_stride * 2, s.q_len, p.qk_chunks, thread);
      for (int w = 0; w < kConsumers; ++w) queries.Copy(first_row + w * 64, shared.q[w]);
      ptx::ArriveAfterCopies(&shared.full_q);
    }
    const int kv_head = at.head / p.group;
    const Copier keys(RowOf(p.k, s.batch, kv_head, s.kv_begin), p.k.row_stride * 2, s.kv_len, p.qk_chunks, thread);
    const Copier values(RowOf(p.v, s.batch, kv_head, s.kv_begin), p.v.row_stride * 2, s.kv_len, p.v_chunks, thread);
    const int count = tiles.count();
    int last = 0;
#pragma unroll 1
    for (int n = 0; n <= count; ++n) {
      const int first = n < count ? tiles.Here().First() : 0;
      if (n < count) {
        const uint32_t i = place.visit + n, stage = i & 1;
        ptx::WaitFor(&shared.empty_k[stage], ((i >> 1) & 1) ^ 1);
        keys.Copy(first, shared.k[stage]);
        ptx::ArriveAfterCopies(&shared.full_k[stage]);
      }
      if (n > 0) {
        const uint32_t i = place.visit + n - 1, stage = i & 1;
        ptx::WaitFor(&shared.empty_v[stage], ((i >> 1) & 1) ^ 1);
        values.Copy(last, shared.v[stage]);
        ptx::ArriveAfterCopies(&shared.full_v[stage]);
      }
      last = first;
      if (n < count) tiles.Advance();
    }
    place.visit += count;
  }

  using Output = float[1][kChunks][4];
  using Scores = typename Rows::Scores;
  static constexpr int kPanelStep = 32, kValueStep = 2048;
  ATTN_HD static void MultiplyQK(uint32_t q, uint32_t k, Scores& rS) {
    const uint64_t a = ptx::MatrixOf(q, 16, 1024), b = ptx::MatrixOf(k, 16, 1024);
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int panel = i >> 2, step = i & 3;
      Math::Scores(rS[0], a + ((panel * 64 * 128 + step * 32) >> 4), b + ((panel * kKeys * 128 + step * 32) >> 4), i > 0);
    }
  }
  ATTN_HD static void MultiplyPV(const typename Rows::Probabilities& rP, uint32_t v, Output& rO) {
    const uint64_t b = ptx::MatrixOf(v, kKeys * 128, 1024);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint32_t a[4] = {rP[0][2 * i][0], rP[0][2 * i][1], rP[0][2 * i + 1][0], rP[0][2 * i + 1][1]};
      Math::Values(rO[0], a, b + ((i * 2048) >> 4));
    }
  }
  ATTN_HD static void PinP(typename Rows::Probabilities& rP) {
#pragma unroll
    for (int t = 0; t < kGroups; ++t) { ptx::Pin(rP[0][t][0]); ptx::Pin(rP[0][t][1]); }
  }

  ATTN_HD static void Consume(const ScoreContext& at, Visits& tiles, int block_row, int w, int thread, Place& place, Shared& shared) {
    const int lane = thread & 31;
    const int warp = __shfl_sync(~0u, thread >> 5, 0);
    const int first_row = block_row + w * 64 + warp * 16;
    const uint32_t q = ptx::SharedAddress(shared.q[w]);
    const uint32_t k0 = ptx::SharedAddress(shared.k), v0 = ptx::SharedAddress(shared.v);
    constexpr int kBytes = kKeys * kChunks * 16;
    const DropoutPolicy dropout(at);
    const float multiplier = Rule::Multiplier(at.problem);
    typename Rows::State rows;
    Rows::Clear(rows);
    Output rO;
#pragma unroll
    for (int n = 0; n < kChunks * 4; ++n) rO[0][n >> 2][n & 3] = 0;
    const int count = tiles.count();
    ptx::WaitFor(&shared.full_q, place.tile & 1);
    Scores rS;
    typename Rows::Probabilities rP;
    typename Rows::Factors factors;
    uint32_t i = place.visit;
    ptx::WaitFor(&shared.full_k[i & 1], (i >> 1) & 1);
    ptx::FenceShared();
    ptx::FenceProducts();
    MultiplyQK(q, k0 + (i & 1) * kBytes, rS);
    ptx::CommitProducts();
    ptx::WaitForProducts<0>(rS[0]);
    if (lane == 0) ptx::Arrive(&shared.empty_k[i & 1]);
    {
      const auto visit = tiles.Here();
      uint32_t shown[kGroups / 4] = {};
      if (Rule::kEveryTile || visit.IsPartial()) Rows::ApplyRule(at, visit, first_row, lane, shown, 0, rS, rows);
      Rows::Grow(rS, multiplier, rows, factors);
      Rows::MakeP(multiplier, rows, rS);
      Rows::Pack(rS, dropout, first_row, visit.First(), lane, rP);
      PinP(rP);
      tiles.Advance();
    }
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      ++i;
      const uint32_t stage = i & 1, before = stage ^ 1;
      ptx::WaitFor(&shared.full_k[stage], (i >> 1) & 1);
#if PP
      ptx::BarrierSync(1 + w, 256);
#endif
#if FENCES == 1
      ptx::WaitFor(&shared.full_v[before], ((i - 1) >> 1) & 1);
#endif
#if FENCES
      ptx::FenceShared();
#endif
      ptx::FenceProducts();
      MultiplyQK(q, k0 + stage * kBytes, rS);
      ptx::CommitProducts();
#if FENCES != 1
      ptx::WaitFor(&shared.full_v[before], ((i - 1) >> 1) & 1);
#endif
#if FENCES == 2
      ptx::FenceShared();
#endif
      ptx::FenceProducts();
      MultiplyPV(rP, v0 + before * kBytes, rO);
      ptx::CommitProducts();
#if PP
      ptx::BarrierArrive(1 + (w + 1 == kConsumers ? 0 : w + 1), 256);
#endif
      ptx::WaitForProducts<1>(rS[0]);
      if (lane == 0) ptx::Arrive(&shared.empty_k[stage]);
      const auto visit = tiles.Here();
      uint32_t shown[kGroups / 4] = {};
      if (Rule::kEveryTile || visit.IsPartial()) Rows::ApplyRule(at, visit, first_row, lane, shown, 0, rS, rows);
      const bool grew = Rows::Grow(rS, multiplier, rows, factors);
      Rows::MakeP(multiplier, rows, rS);
      ptx::Pin(rS[0]);
#if KEEP == 1
      if (ptx::VoteAny(rows.sum[0][0] + rows.sum[0][1] < 0)) ptx::StoreShared32(&shared.left_out, 1);
#elif KEEP == 2
      ptx::WaitFor(&shared.full_q, 0);
#endif
      ptx::WaitForProducts<0>(rO[0]);
      if (lane == 0) ptx::Arrive(&shared.empty_v[before]);
      Rows::Pack(rS, dropout, first_row, visit.First(), lane, rP);
      if (grew) Rows::Rescale(factors, rO);
      ptx::Pin(rO[0]);
      PinP(rP);
      tiles.Advance();
    }
    if (lane == 0) ptx::Arrive(&shared.empty_q);
    {
      const uint32_t stage = i & 1;
      ptx::WaitFor(&shared.full_v[stage], (i >> 1) & 1);
      ptx::FenceShared();
      ptx::FenceProducts();
      MultiplyPV(rP, v0 + stage * kBytes, rO);
      ptx::CommitProducts();
      ptx::WaitForProducts<0>(rO[0]);
      if (lane == 0) ptx::Arrive(&shared.empty_v[stage]);
    }
    place.visit += count;
    Rows::Finish(at, rows, first_row, lane, count, rO);
    const ProblemDesc& p = at.problem;
    const SequenceDesc& s = at.sequence;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + Accumulator::Row(2 * r, lane);
      if (row >= s.q_len) continue;
      char* out = RowOf(p.o, s.batch, at.head, s.q_begin + row);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) ptx::StoreGlobal32(out + c * 16 + (lane & 3) * 4, Math::Pack(rO[0][c][2 * r], rO[0][c][2 * r + 1]));
    }
  }
};
}  // namespace attnd::sm90
