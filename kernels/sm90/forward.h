// Exact attention, tile of queries by tile of queries, each in one pass over K and V.
//   S = scale·Q·Kᵀ, masked      P = softmax(S)      O = (P∘Z)·V      lse = m + log(l)
// A block stays for many tiles. One warpgroup brings: a warp loads two stages of Q, K and V each by
// tensor maps, the others prepare the next tile's descriptors. The other warpgroups consume:
// each has 64 queries of its own, multiplies the scores of one tile of keys while P·V of the one
// before still runs, and softmaxes under it; they take turns at the tensor cores. Dropout's
// decisions were made ahead (dropout_bits.h). Barriers in shared memory hand tiles over.
// Inputs    float16 or bfloat16; tensor maps of Q, K, V (kernels/rules/params.h)
// Errors    none
// Rows      with no visible key give O = 0 and lse = −inf. What an invisible V row holds never
//           reaches O: in PARTIAL tiles the preparers turn infinities and NaN into zeros before
//           they hand V over; NonFiniteValues puts them into O where they are visible. What follows
//           a sequence in its tensor is hidden as any other key.
// Source    Shah et al. 2024 (FlashAttention-3), Algorithm 2; docs/KERNELS.md has figures and what
//           lost.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/restore_non_finite.h"
#include "kernels/sm80/forward_rows.h"
#include "kernels/sm80/forward_visits.h"
#include "kernels/sm90/dropout_bits.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

template <class Math, Tile kTile, class Rule, class DropoutPolicy>
struct ForwardKernel {
  static constexpr int kConsumers = kTile.q_rows / kGroupRows;
  static constexpr int kThreads = kGroupThreads * (kConsumers + 1);
  static constexpr int kHeadDim = kTile.head_dim, kPanels = kHeadDim / kPanelColumns;
  static constexpr int kBlockRows = kTile.q_rows, kKeys = kTile.kv_rows, kGroups = kKeys / 8;
  static constexpr int kQStages = 2, kStages = 2, kSlots = 3;  // of Q; K and V; tiles' descriptors
  // 64 Ki registers an SM.
  static constexpr int kBringerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kHeadDim % kPanelColumns == 0 && (kConsumers == 2 || kConsumers == 3));
  static constexpr bool kDrops = DropoutPolicy::kDrops;
  static constexpr int kDropoutStride = ForwardDropoutWords(kBlockRows);  // words of a visit
  static_assert(kKeys == kForwardKeys);

  using Visits = sm80::KeyVisits<Rule>;
  struct alignas(1024) Shared {
    char q[kQStages][kPanels * PanelBytes(kBlockRows)];
    char k[kStages][kPanels * PanelBytes(kKeys)], v[kStages][kPanels * PanelBytes(kKeys)];
    char o[4 * kConsumers][kPanels * PanelBytes(kStoredRows)];  // of each warp, on their way out
    uint64_t full_q[kQStages], empty_q[kQStages], full_k[kStages], empty_k[kStages],
        full_v[kStages], empty_v[kStages];
    uint64_t raw_v[kStages];  // of a PARTIAL tile, as it came
    uint64_t full_work[kSlots], empty_work[kSlots];
    Descriptors descriptors[kSlots];
    TileWork tiles[kSlots];
    int numbers[kSlots];   // of tiles
    int left_out[kSlots];  // whether an infinity or NaN of a PARTIAL tile of V was left out
    uint32_t first_dropout[kSlots];  // of their visits in LaunchParams::dropout_bits
  };
  static_assert(sizeof(Shared) <= 227 << 10);

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    if (at.thread == 0) InitBarriers(shared);
    ptx::SyncThreads();
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<kBringerRegisters>();
      if (at.thread < kWarpLanes) {
        Load(params, at.thread, shared);
      } else {
        Prepare(params, at, at.thread - kWarpLanes, shared);
      }
    } else {
      ptx::TakeRegisters<kConsumerRegisters>();
      Consume(params, group - 1, at.thread % kGroupThreads, shared);
    }
  }

 private:
  using Rows = sm80::ForwardRows<Math, Rule, DropoutPolicy, 1, kGroups>;
  using Scores = typename Rows::Scores;
  using Probabilities = typename Rows::Probabilities;
  using Output = float[1][kHeadDim / 8][4];
  static constexpr int kPreparers = kGroupThreads - kWarpLanes;
  // Named barriers: the preparers', and whose turn of the consumers it is.
  enum BarrierId { kPreparing = 1, kTurn = 2 };
  // A role's place: the tiles so far, those of them that visit anything, visits.
  struct Place {
    uint32_t tile = 0, filled = 0, visit = 0;
    ATTN_HD uint32_t slot() const { return tile % kSlots; }
  };
  // The parity of the phase that a barrier's n-th use ends, of `uses` barriers in turn.
  ATTN_HD static uint32_t Parity(uint32_t n, int uses) { return n / uses & 1; }

  struct Work {
    ScoreContext at;
    Visits tiles;
    int block_row;  // the first
  };
  ATTN_HD static Work WorkOf(Shared& shared, int slot) {
    const ProblemDesc& problem = shared.descriptors[slot].problem;
    const SequenceDesc& sequence = shared.descriptors[slot].sequence;
    const TileWork& tile = shared.tiles[slot];
    const int first_row = tile.tile * kBlockRows;
    const int end_row = MinInt(first_row + kBlockRows, sequence.q_len);
    return {{problem, sequence, tile.batch, tile.head, Rule::OptionsOf(problem)},
            Visits(problem, sequence, tile, first_row, end_row, kKeys),
            first_row};
  }

  ATTN_HD static void InitBarriers(Shared& shared) {
    constexpr int kWarps = 4 * kConsumers;
    for (int n = 0; n < kQStages; ++n) {
      ptx::InitBarrier(&shared.full_q[n], 1);
      ptx::InitBarrier(&shared.empty_q[n], kWarps);
    }
    for (int n = 0; n < kSlots; ++n) {
      ptx::InitBarrier(&shared.full_work[n], kPreparers);
      ptx::InitBarrier(&shared.empty_work[n], kWarps + 1);
    }
    for (int n = 0; n < kStages; ++n) {
      ptx::InitBarrier(&shared.full_k[n], 1);
      ptx::InitBarrier(&shared.full_v[n], 1);
      ptx::InitBarrier(&shared.raw_v[n], 1);
      ptx::InitBarrier(&shared.empty_k[n], kWarps);
      ptx::InitBarrier(&shared.empty_v[n], kWarps);
    }
    ptx::FenceBarriers();
  }

  // ---- The loader, a warp of which one lane works.
  ATTN_HD static void Load(const LaunchParams& params, int lane, Shared& shared) {
    Place place;
    int last_problem = -1;
#pragma unroll 1
    for (;; ++place.tile) {
      const int slot = place.slot();
      ptx::WaitForPhase(&shared.full_work[slot], Parity(place.tile, kSlots));
      if (ptx::LoadShared32(&shared.numbers[slot]) >= params.tile_count) return;
      Work work = WorkOf(shared, slot);
      if (lane == 0 && work.tiles.count() > 0) {
        const int problem = ptx::LoadShared32(&shared.tiles[slot].problem);
        if (problem != last_problem) {
          for (int n = 0; n < kForwardMaps; ++n) ptx::FenceMap(work.at.problem.maps + n);
        }
        last_problem = problem;
        LoadTiles(work, place, shared);
        ++place.filled;
      }
      ptx::SyncWarp();  // all lanes have read it
      if (lane == 0) ptx::Arrive(&shared.empty_work[slot]);
    }
  }
  ATTN_HD static void LoadTiles(Work& work, Place& place, Shared& shared) {
    const SequenceDesc& s = work.at.sequence;
    const int kv_head = work.at.head / work.at.problem.group, count = work.tiles.count();
    const uint32_t q_stage = place.filled % kQStages;
    ptx::WaitForPhase(&shared.empty_q[q_stage], Parity(place.filled, kQStages) ^ 1);
    LoadTile<kBlockRows>(work, kMapOfQ, work.at.head, s.q_begin + work.block_row,
                         &shared.full_q[q_stage], shared.q[q_stage]);
    int before = 0;
    bool was_partial = false;
    // K of a visit stands before V of the one before, as consumers want them.
#pragma unroll 1
    for (int n = 0; n <= count; ++n, ++place.visit) {
      const auto visit = work.tiles.Here();
      uint32_t stage = place.visit % kStages;
      if (n < count) {
        ptx::WaitForPhase(&shared.empty_k[stage], Parity(place.visit, kStages) ^ 1);
        LoadTile<kKeys>(work, kMapOfK, kv_head, s.kv_begin + visit.First(), &shared.full_k[stage],
                        shared.k[stage]);
      }
      if (n > 0) {
        stage = (place.visit - 1) % kStages;
        ptx::WaitForPhase(&shared.empty_v[stage], Parity(place.visit - 1, kStages) ^ 1);
        LoadTile<kKeys>(work, kMapOfV, kv_head, s.kv_begin + before,
                        was_partial ? &shared.raw_v[stage] : &shared.full_v[stage],
                        shared.v[stage]);
      }
      if (n == count) break;
      before = visit.First();
      was_partial = visit.IsPartial();
      work.tiles.Advance();
    }
  }
  template <int kRows>
  ATTN_HD static void LoadTile(const Work& work, MapOf map, int head, int row, uint64_t* barrier,
                               char* to) {
    ptx::ArriveExpecting(barrier, kPanels * PanelBytes(kRows));
#pragma unroll
    for (int n = 0; n < kPanels; ++n) {
      ptx::LoadBox(to + n * PanelBytes(kRows), work.at.problem.maps + map, n * kPanelColumns, row,
                   head, work.at.sequence.batch, barrier);
    }
  }

  // ---- The preparers: descriptors of the tile after this one, then this one's PARTIAL tiles of V.
  ATTN_HD static void Prepare(const LaunchParams& params, ThreadIndex at, int thread,
                              Shared& shared) {
    Place place;
    uint32_t raw_parities = 0;  // a bit a stage
    PutWork(params, 0, at.block, thread, shared);
#pragma unroll 1
    for (;; ++place.tile) {
      const int slot = place.slot();
      ptx::WaitForPhase(&shared.full_work[slot], Parity(place.tile, kSlots));
      if (ptx::LoadShared32(&shared.numbers[slot]) >= params.tile_count) return;
      int next = 0;
      if (thread == 0) {
        next = at.blocks + ptx::AddGlobal(params.taken, 1) - params.taken_before;
      }
      PutWork(params, place.tile + 1, next, thread, shared);
      Work work = WorkOf(shared, slot);
      const int count = work.tiles.count();
#pragma unroll 1
      for (int n = 0; n < count; ++n, ++place.visit) {
        const uint32_t stage = place.visit % kStages;
        if (work.tiles.Here().IsPartial()) {
          ptx::WaitForPhase(&shared.raw_v[stage], raw_parities >> stage & 1);
          raw_parities ^= 1u << stage;
          if (LeaveOut(shared.v[stage], thread)) {
            ptx::StoreShared32(&shared.left_out[slot], 1);
            ptx::FenceShared();
          }
          ptx::BarrierSync(kPreparing, kPreparers);
          if (thread == 0) ptx::Arrive(&shared.full_v[stage]);
        }
        work.tiles.Advance();
      }
    }
  }
  // The first thread knows `next`.
  ATTN_HD static void PutWork(const LaunchParams& params, uint32_t tile, int next, int thread,
                              Shared& shared) {
    const int slot = tile % kSlots;
    ptx::WaitForPhase(&shared.empty_work[slot], Parity(tile, kSlots) ^ 1);
    if (thread == 0) ptx::StoreShared32(&shared.numbers[slot], next);
    ptx::BarrierSync(kPreparing, kPreparers);
    const int number = ptx::LoadShared32(&shared.numbers[slot]);
    if (number < params.tile_count) {
      const TileWork work = params.tiles[number];
      BringDescriptors(params, work, thread, kPreparers, shared.descriptors[slot]);
      if (thread == 0) {
        ptx::StoreShared128(&shared.tiles[slot],
                            make_uint4(work.problem, work.batch, work.head, work.tile));
        ptx::StoreShared32(&shared.left_out[slot], 0);
        if constexpr (kDrops) {
          ptx::StoreShared32(&shared.first_dropout[slot],
                             ptx::LoadConstant32(params.first_rounds + number));
        }
      }
    }
    ptx::Arrive(&shared.full_work[slot]);
  }
  // Puts zeros in place of infinities and NaN; returns whether this thread met one.
  ATTN_HD static bool LeaveOut(char* tile, int thread) {
    bool met = false;
#pragma unroll 1
    for (int n = thread * 16; n < kPanels * PanelBytes(kKeys); n += kPreparers * 16) {
      const uint4 words = ptx::LoadShared128(tile + n);
      const uint4 bad = NonFiniteHalves<Math>(words);
      if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
      met = true;
      ptx::StoreShared128(tile + n, FiniteHalves<Math>(words));
    }
    return met;
  }

  // ---- The consumers.
  struct Own {
    int first_row;  // of the warp, in the sequence
    int tile_row;   // the same in the block's tile
    int lane, group;
  };
  ATTN_HD static void Consume(const LaunchParams& params, int group, int thread, Shared& shared) {
    Place place;
    const int lane = thread % kWarpLanes, warp = ptx::Uniform(thread / kWarpLanes);
    // The last one lets the first one start.
    if (group == kConsumers - 1) PassTurn(group);
#pragma unroll 1
    for (;; ++place.tile) {
      const int slot = place.slot();
      ptx::WaitForPhase(&shared.full_work[slot], Parity(place.tile, kSlots));
      if (ptx::LoadShared32(&shared.numbers[slot]) >= params.tile_count) break;
      Work work = WorkOf(shared, slot);
      const int tile_row = group * kGroupRows + warp * 16;
      const Own own = {work.block_row + tile_row, tile_row, lane, group};
      if (work.tiles.count() == 0) {
        WriteEmptyRows(work, own);
      } else {
        Attend(params, work, own, place, shared);
        ++place.filled;
      }
      ptx::SyncWarp();
      if (lane == 0) ptx::Arrive(&shared.empty_work[slot]);
    }
    // Takes the turn that was left to the first one, for barriers that end as they began.
    if (group == 0) TakeTurn(group);
  }
  ATTN_HD static void TakeTurn(int group) { ptx::BarrierSync(kTurn + group, 2 * kGroupThreads); }
  ATTN_HD static void PassTurn(int group) {
    ptx::BarrierArrive(kTurn + (group + 1 == kConsumers ? 0 : group + 1), 2 * kGroupThreads);
  }
  ATTN_HD static void Release(const Own& own, uint64_t* barrier) {
    if (own.lane == 0) ptx::Arrive(barrier);
  }

  // The lane's decisions on the first visit.
  ATTN_HD static const uint32_t* DropoutWordsOf(const LaunchParams& params, const Own& own,
                                                const Place& place, Shared& shared) {
    if constexpr (kDrops) {
      const int64_t first = ptx::LoadShared32(&shared.first_dropout[place.slot()]);
      return params.dropout_bits + first * kDropoutStride + ForwardDropoutWords(own.tile_row) +
             own.lane * kForwardLaneWords;
    } else {
      return nullptr;
    }
  }
  ATTN_HD static void Attend(const LaunchParams& params, Work& work, const Own& own, Place& place,
                             Shared& shared) {
    DropoutPolicy dropout(DropoutWordsOf(params, own, place, shared));
    dropout.Load(kDropoutStride);
    const float multiplier = Rule::Multiplier(work.at.problem);
    const int count = work.tiles.count();
    const uint32_t q_stage = place.filled % kQStages;
    const char* q = shared.q[q_stage] + own.group * PanelBytes(kGroupRows);
    typename Rows::State rows;
    Rows::Clear(own.first_row, work.at.sequence.q_len, own.lane, rows);
    Output rO;
#pragma unroll
    for (int n = 0; n < kHeadDim / 2; ++n) rO[0][n >> 2][n & 3] = 0;
    Scores rS;
    Probabilities rP;
    typename Rows::Factors factors;
    uint32_t i = place.visit, stage = i % kStages;
    ptx::WaitForPhase(&shared.full_q[q_stage], Parity(place.filled, kQStages));
    ptx::WaitForPhase(&shared.full_k[stage], Parity(i, kStages));
    ptx::FenceProducts();
    MultiplyRows<Math, kHeadDim, kBlockRows>(q, shared.k[stage], rS[0]);
    ptx::CommitProducts();
    ptx::WaitForProducts<0>(rS[0]);
    Release(own, &shared.empty_k[stage]);
    Softmax(work, own, multiplier, rS, rows, factors);
    Pack(own, dropout, rS, rP);
    work.tiles.Advance();
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      dropout.Load(kDropoutStride);
      const uint32_t before = stage;
      stage = ++i % kStages;
      ptx::WaitForPhase(&shared.full_k[stage], Parity(i, kStages));
      TakeTurn(own.group);
      ptx::FenceProducts();
      MultiplyRows<Math, kHeadDim, kBlockRows>(q, shared.k[stage], rS[0]);
      ptx::CommitProducts();
      ptx::WaitForPhase(&shared.full_v[before], Parity(i - 1, kStages));
      ptx::FenceProducts();
      AddColumns<Math, kKeys / kDepth>(rP[0], shared.v[before], rO[0]);
      ptx::CommitProducts();
      PassTurn(own.group);
      ptx::WaitForProducts<1>(rS[0]);
      Release(own, &shared.empty_k[stage]);
      const bool grew = Softmax(work, own, multiplier, rS, rows, factors);
      ptx::Pin(rS[0]);
      ptx::WaitForProducts<0>(rO[0]);
      Release(own, &shared.empty_v[before]);
      Pack(own, dropout, rS, rP);
      if (grew) Rows::Rescale(factors, rO);
      ptx::Pin(rO[0]);
      work.tiles.Advance();
    }
    Release(own, &shared.empty_q[q_stage]);
    ptx::WaitForPhase(&shared.full_v[stage], Parity(i, kStages));
    ptx::FenceProducts();
    AddColumns<Math, kKeys / kDepth>(rP[0], shared.v[stage], rO[0]);
    ptx::CommitProducts();
    ptx::WaitForProducts<0>(rO[0]);
    Release(own, &shared.empty_v[stage]);
    place.visit += count;
    Rows::Finish(work.at, rows, own.first_row, own.lane, count, rO);
    Write(work, own, rO, shared.o[own.tile_row / kStoredRows]);
    if (ptx::LoadShared32(&shared.left_out[place.slot()])) RestoreRow(work, own);
  }
  // Scores to probabilities; whether stabilisers grew, and then by which factors sums shrink.
  ATTN_HD static bool Softmax(const Work& work, const Own& own, float multiplier, Scores& rS,
                              typename Rows::State& rows, typename Rows::Factors& factors) {
    const auto visit = work.tiles.Here();
    uint32_t shown[kKeys / kUnitColumns] = {};
    if constexpr (Rule::kListed) {
      const int square = SquareOf(own.tile_row, 0, kKeys);
      Rows::LoadShown(
          ptx::Offset(work.at.problem.tile_lists.bitmaps + square + own.lane,
                      static_cast<int>(work.tiles.Bitmap()), BitmapWords(kBlockRows, kKeys) * 4),
          visit.IsMasked(), shown);
    }
    if (Rule::kEveryTile || visit.IsPartial()) {
      Rows::ApplyRule(work.at, visit, own.first_row, own.lane, shown, own.tile_row & 16, rS, rows);
    }
    const bool grew = Rows::Grow(rS, multiplier, rows, factors);
    Rows::MakeP(multiplier, rows, rS);
    return grew;
  }
  ATTN_HD static void Pack(const Own& own, const DropoutPolicy& dropout, const Scores& rS,
                           Probabilities& rP) {
    Rows::Pack(rS, dropout, own.first_row, 0, own.lane, rP);
#pragma unroll
    for (int n = 0; n < kGroups * 2; ++n) ptx::Pin(rP[0][n >> 1][n & 1]);
  }

  // ---- Output.
  ATTN_HD static void Write(const Work& work, const Own& own, const Output& rO, char* room) {
    const ProblemDesc& p = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const RowsOut out = {RowOf(p.o, s.batch, work.at.head, s.q_begin + own.first_row),
                         2 * p.o.row_stride, s.q_len - own.first_row, p.v_chunks};
    if constexpr (Rule::kListed) {
      if (IsRun(p)) {
        return StoreFloatRows<kHeadDim>(rO[0], own.lane, out, [](float low, float high) {
          return make_uint2(ptx::FloatBits(low), ptx::FloatBits(high));
        });
      }
    }
    StoreRows<kHeadDim>(
        rO[0], [](float low, float high) { return Math::Pack(low, high); }, own.lane, room, out);
  }
  ATTN_HD static void RestoreRow(const Work& work, const Own& own) {
    ptx::SyncWarp();  // the warp's rows of O are written
    const int row = own.first_row + own.lane;
    if (own.lane >= 16 || row >= work.at.sequence.q_len) return;
    NonFiniteValues<Math, Rule, kDrops>::Restore(work.at, work.tiles, kKeys, row);
  }
  // No key is visible to any row of this tile.
  ATTN_HD static void WriteEmptyRows(const Work& work, const Own& own) {
    const ProblemDesc& p = work.at.problem;
    const SequenceDesc& s = work.at.sequence;
    const int row = own.first_row + own.lane;
    if (own.lane >= 16 || row >= s.q_len) return;
    ptx::StoreGlobalFloat(
        p.lse + s.batch * p.lse_batch + work.at.head * p.lse_head + s.q_begin + row, -Infinity());
    if (IsRun(p)) return;  // such rows of its O are not read
    char* out = RowOf(p.o, s.batch, work.at.head, s.q_begin + row);
    for (int c = 0; c < p.v_chunks; ++c) {
      ptx::StoreGlobal128(out + c * 16, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace attnd::sm90
