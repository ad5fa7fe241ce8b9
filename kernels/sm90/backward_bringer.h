// The warps of the backward kernel (backward.h) that bring: one loads tiles by tensor maps, one
// brings what belongs to rows of Q and dO, and one prepares the next tile of keys. Dropout's
// decisions come with a tile of dO. The last zeroes dQ's sums, head after head, while the first
// ones' are in use already. Errors: none.
//
// Rows that are not finite, and what follows a sequence in its tensor, must not reach the keys that
// do not see them, not even as 0·NaN. The second warp therefore loads such a tile itself and turns
// infinities and NaN into zeros before it hands the tile over. A row of Q that held some has P = 0
// (or NaN, if its lse is); DqKernel puts into dK and dV what is missing (rules/non_finite_rows.h).
#pragma once

#include "kernels/sm90/backward_layout.h"

namespace attnd::sm90 {

template <class Layout>
struct BackwardBringer {
  using Math = typename Layout::Math;
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;
  static constexpr int kQueries = Layout::kQueries, kStages = Layout::kStages;
  static constexpr int kRowsOfLane = kQueries / kWarpLanes;
  static constexpr bool kDrops = Layout::Dropout::kDrops;
  static constexpr int kDropoutBytes = kDrops ? kDropoutWords * 4 : 0;  // beside a tile of dO

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const int warp = ptx::Uniform(at.thread / kWarpLanes), lane = at.thread % kWarpLanes;
    if (warp == 0) {
      if (lane == 0) Load(params, shared);
    } else if (warp == 1) {
      BringRows(params, lane, shared);
    } else if (warp == 2) {
      Prepare(params, at, lane, shared);
    } else {
      ZeroSums(params, at.blocks, lane, shared);
    }
  }
  // Puts zeros in place of infinities and NaN of 16 bytes; returns whether there were any.
  template <class Element>
  ATTN_HD static uint32_t CleanChunk(char* chunk) {
    const uint4 words = ptx::LoadShared128(chunk);
    const uint4 bad = NonFiniteHalves<Element>(words);
    const uint32_t met = bad.x | bad.y | bad.z | bad.w;
    if (met != 0) ptx::StoreShared128(chunk, FiniteHalves<Element>(words));
    return met;
  }

 private:
  using Cursor = VisitCursor<Layout::Rule::kListed>;
  struct Place {
    ListedVisit visit;
    int head;
    uint32_t bitmap;
  };
  ATTN_HD static Place PlaceOf(const QueryVisits& visits, const Cursor& at) {
    const uint32_t loaded = at.Load();
    return {at.Visit(visits, loaded), at.head(), at.Bitmap(loaded)};
  }
  ATTN_HD static bool IsDirty(const Work& work, const Place& place) {
    return work.non_finite() || place.visit.First() + kQueries > work.sequence.q_len;
  }

  // ---- The loader, one thread.
  ATTN_HD static void Load(const LaunchParams& params, Shared& shared) {
    int last_problem = -1;
#pragma unroll 1
    for (int tile = 0; Layout::WaitForWork(params, tile, shared); ++tile) {
      const Work work = Layout::WorkOf(tile, shared);
      if (work.tile().problem != last_problem) {
        for (int n = 0; n < kBackwardMaps; ++n) ptx::FenceMap(work.problem.maps + n);
      }
      last_problem = work.tile().problem;
      const QueryVisits visits = work.Visits();
      Cursor at(visits);
      if (work.rounds() == 0) ptx::Arrive(&shared.near_end);
#pragma unroll 1
      for (int n = 0; n < work.rounds(); ++n) {
        if (n == work.LeadRound()) ptx::Arrive(&shared.near_end);
        LoadRound(params, work, PlaceOf(visits, at), n, shared);
        if (n == 0) LoadKeys(work, tile, shared);
        at.Advance(visits);
      }
      if (work.rounds() == 0) LoadKeys(work, tile, shared);
      ptx::Arrive(&shared.empty_work[tile % Layout::kSlots]);
    }
  }
  // The tile's n-th.
  ATTN_HD static void LoadRound(const LaunchParams& params, const Work& work, const Place& place,
                                int n, Shared& shared) {
    const SequenceDesc& s = work.sequence;
    const int round = work.first() + n, stage = round % kStages;
    const int row = s.q_begin + place.visit.First();
    const uint32_t parity = Layout::Parity(round, kStages) ^ 1;
    const bool dirty = IsDirty(work, place);
    if (!dirty) {
      ptx::WaitForPhase(&shared.empty_q[stage], parity);
      LoadTile<kQueries>(work.problem, s, kMapOfQ, place.head, row, &shared.full_q[stage],
                         shared.q[stage]);
    }
    if (dirty && !kDrops) return;
    uint64_t* const full = &shared.full_d_o[stage];
    ptx::WaitForPhase(&shared.empty_d_o[stage], parity);
    if (dirty) {
      ptx::ArriveExpecting(full, kDropoutBytes);
    } else {
      LoadTile<kQueries>(work.problem, s, kMapOfDo, place.head, row, full, shared.d_o[stage],
                         kDropoutBytes);
    }
    if constexpr (kDrops) {
      ptx::LoadInBulk(shared.kept[stage],
                      params.dropout_bits + (work.first_dropout() + n) * kDropoutWords,
                      kDropoutBytes, full);
    }
  }
  // This comes after the first round's tiles, since those of the tile before are in use to its end.
  ATTN_HD static void LoadKeys(const Work& work, int tile, Shared& shared) {
    const SequenceDesc& s = work.sequence;
    const int key = s.kv_begin + work.first_key();
    const uint32_t parity = Layout::Parity(tile, 1) ^ 1;
    ptx::WaitForPhase(&shared.empty_v, parity);
    LoadTile<Layout::kKeys>(work.problem, s, kMapOfV, work.kv_head(), key, &shared.full_v,
                            shared.v);
    ptx::WaitForPhase(&shared.empty_k, parity);
    LoadTile<Layout::kKeys>(work.problem, s, kMapOfK, work.kv_head(), key, &shared.full_k,
                            shared.k);
  }
  template <int kRows>
  ATTN_HD static void LoadTile(const ProblemDesc& problem, const SequenceDesc& sequence, MapOf map,
                               int head, int row, uint64_t* barrier, char* to,
                               int other_bytes = 0) {
    ptx::ArriveExpecting(barrier, Layout::kPanels * PanelBytes(kRows) + other_bytes);
#pragma unroll
    for (int n = 0; n < Layout::kPanels; ++n) {
      ptx::LoadBox(to + n * PanelBytes(kRows), problem.maps + map, n * kPanelColumns, row, head,
                   sequence.batch, barrier);
    }
  }

  // ---- What belongs to rows.
  struct Rows {
    float stabilizer[kRowsOfLane], delta[kRowsOfLane], dq_factor[kRowsOfLane];
    int gain;
  };
  ATTN_HD static void BringRows(const LaunchParams& params, int lane, Shared& shared) {
    uint32_t cleaned = 0;
#pragma unroll 1
    for (int tile = 0; Layout::WaitForWork(params, tile, shared); ++tile) {
      const Work work = Layout::WorkOf(tile, shared);
      if (work.rounds() > 0) BringRowsOf(work, lane, cleaned, shared);
      ptx::SyncWarp();  // all lanes have read the slot
      if (lane == 0) ptx::Arrive(&shared.empty_work[tile % Layout::kSlots]);
    }
  }
  ATTN_HD static void BringRowsOf(const Work& work, int lane, uint32_t& cleaned, Shared& shared) {
    const QueryVisits visits = work.Visits();
    Cursor at(visits);
    Place place = PlaceOf(visits, at);
    Rows rows;
    LoadRows(work, place, lane, rows);
    const int end = work.first() + work.rounds();
    int exponent = rows.gain == kNoGain ? 0 : rows.gain;
#pragma unroll 1
    for (int round = work.first(); round < end; ++round) {
      const int stage = round % kStages, slot = round % Layout::kPlaces;
      const uint32_t parity = Layout::Parity(round, kStages) ^ 1;
      const bool dirty = IsDirty(work, place);
      ptx::WaitForPhase(&shared.empty_q[stage], parity);
      if (dirty) {
        LoadDirty(work, kMapOfQ, place, lane, cleaned, shared.q[stage], shared, rows.stabilizer);
      }
      const bool changes = rows.gain != kNoGain && rows.gain != exponent;
      if (changes) exponent = rows.gain;
      const float ungain = PowerOfTwo(-exponent);
      bool has_rests = false;
#pragma unroll
      for (int n = 0; n < kRowsOfLane; ++n) {
        const int row = n * kWarpLanes + lane;
        const float factor = rows.dq_factor[n];
        const float size = FixedPoint::RowFactor(ptx::Absolute(factor), ungain);
        ptx::StoreSharedFloat(&shared.stabilizer[stage][row], rows.stabilizer[n]);
        ptx::StoreSharedFloat(&shared.dq_factor[slot][row], factor < 0 ? -size : size);
        has_rests |= factor < 0;
      }
      const bool any_rests = ptx::VoteAny(has_rests);
      if (lane == 0) {
        ptx::StoreShared128(
            &shared.places[slot],
            make_uint4(place.visit.word, static_cast<uint32_t>(place.head), place.bitmap,
                       typename Layout::RoundScale{exponent, changes, any_rests}.Word()));
      }
      HandOver(dirty, lane, &shared.full_q[stage]);
      ptx::WaitForPhase(&shared.empty_d_o[stage], parity);
      // The tile's first sums leave in its second round.
      if (!Layout::kZeroedAhead && round == MinInt(work.first() + 1, end - 1)) {
        WaitForZeros(work.problem, work.sequence, work.batch(), work.kv_head());
      }
      if (dirty) {
        float unused[kRowsOfLane] = {};
        LoadDirty(work, kMapOfDo, place, lane, cleaned, shared.d_o[stage], shared, unused);
      }
#pragma unroll
      for (int n = 0; n < kRowsOfLane; ++n) {
        ptx::StoreSharedFloat(&shared.delta[stage][n * kWarpLanes + lane],
                              rows.delta[n] * PowerOfTwo(exponent - kProbabilityShift));
      }
      HandOver(dirty && !kDrops, lane, &shared.full_d_o[stage]);
      if (round + 1 == end) break;
      at.Advance(visits);
      place = PlaceOf(visits, at);
      LoadRows(work, place, lane, rows);
    }
  }
  // Waits until the sums of a head are zero.
  ATTN_HD static void WaitForZeros(const ProblemDesc& p, const SequenceDesc& s, int batch,
                                   int kv_head) {
    ptx::WaitForCount(GradientBounds(p, batch, kv_head) + kZeroedBlocks,
                      p.group * static_cast<int>(DqBlocks(s.q_len)));
    ptx::FenceBulk();
  }
  // `alone` says that the loader, which had nothing to load, has not arrived.
  ATTN_HD static void HandOver(bool alone, int lane, uint64_t* full) {
    ptx::SyncWarp();
    if (lane != 0) return;
    ptx::Arrive(full);
    if (alone) ptx::Arrive(full);
  }
  ATTN_HD static void LoadRows(const Work& work, const Place& place, int lane, Rows& rows) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const int64_t head = s.batch * p.lse_batch + place.head * p.lse_head + s.q_begin;
    rows.gain = GainOfTile(p, work.batch(), place.head, place.visit.First() / kDqBlockRows);
#pragma unroll
    for (int n = 0; n < kRowsOfLane; ++n) {
      const int row = place.visit.First() + n * kWarpLanes + lane;
      rows.stabilizer[n] = Infinity();
      rows.delta[n] = 0;
      rows.dq_factor[n] = 1;
      if (row >= s.q_len) continue;
      rows.stabilizer[n] = ptx::LoadConstantFloat(p.stabilizer + head + row);
      rows.delta[n] = ptx::LoadConstantFloat(p.delta + head + row);
      rows.dq_factor[n] = ptx::LoadConstantFloat(p.dq_factor + head + row);
    }
  }
  // A tile with zeros in place of infinities and NaN. A lane has whole rows.
  ATTN_HD static void LoadDirty(const Work& work, MapOf map, const Place& place, int lane,
                                uint32_t& cleaned, char* tile, Shared& shared,
                                float (&stabilizer)[kRowsOfLane]) {
    if (lane == 0) {
      LoadTile<kQueries>(work.problem, work.sequence, map, place.head,
                         work.sequence.q_begin + place.visit.First(), &shared.raw, tile);
    }
    ptx::WaitForPhase(&shared.raw, cleaned++ & 1);
#pragma unroll
    for (int n = 0; n < kRowsOfLane; ++n) {
      uint32_t met = 0;
#pragma unroll 1
      for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
        met |= CleanChunk<Math>(tile + PanelOffset<kQueries>(n * kWarpLanes + lane, chunk));
      }
      if (met != 0 && stabilizer[n] == stabilizer[n]) stabilizer[n] = Infinity();
    }
    ptx::FenceShared();
  }

  // ---- The preparer: the tile after this one.
  ATTN_HD static void Prepare(const LaunchParams& params, ThreadIndex at, int lane,
                              Shared& shared) {
    int last_problem = -1;
    PutWork(params, 0, at.block, 0, lane, last_problem, shared);
    int tile = 0;
#pragma unroll 1
    for (; Layout::WaitForWork(params, tile, shared); ++tile) {
      const Work work = Layout::WorkOf(tile, shared);
      ptx::WaitForPhase(&shared.near_end, Layout::Parity(tile, 1));
      int next = 0;
      if (lane == 0) next = at.blocks + ptx::AddGlobal(params.taken, 1) - params.taken_before;
      PutWork(params, tile + 1, next, work.first() + work.rounds(), lane, last_problem, shared);
    }
    const int last = (tile - 1) % Layout::kSlots;
    ptx::WaitForPhase(&shared.empty_work[last], Layout::Parity(tile - 1, Layout::kSlots));
    if (lane == 0) TellOf(WrittenTilesOf(shared.slots[last]), RunsOf(shared.slots[last]));
  }
  // The dQ kernel, of a tile of a head that has been written, sums of dQ too.
  ATTN_HD static void TellOf(uint32_t* written, uint32_t runs) {
    ptx::FenceBulk();
    ptx::AddRelease(written, runs);
  }
  // Tells that a tile is of kListRuns.
  ATTN_HD static uint32_t RunsOf(const typename Layout::Slot& slot) {
    return Layout::Rule::kListed && IsRun(slot.descriptors.problem) ? 1 : kListRuns;
  }
  // The first lane knows `next`.
  ATTN_HD static void PutWork(const LaunchParams& params, int tile, int next, int first, int lane,
                              int& last_problem, Shared& shared) {
    const int n = tile % Layout::kSlots;
    auto& slot = shared.slots[n];
    ptx::WaitForPhase(&shared.empty_work[n], Layout::Parity(tile, Layout::kSlots) ^ 1);
    const bool reused = tile >= Layout::kSlots;
    const TileWork before = reused ? slot.tile : TileWork{-1, -1, -1, -1};
    uint32_t* const written = reused ? WrittenTilesOf(slot) : nullptr;
    const uint32_t runs = reused ? RunsOf(slot) : 0;
    if (lane == 0) ptx::StoreShared32(&slot.number, static_cast<uint32_t>(next));
    ptx::SyncWarp();
    const int number = static_cast<int>(ptx::LoadShared32(&slot.number));
    if (number < params.tile_count) {
      const TileWork work = params.tiles[number];
      const ProblemDesc& problem = params.problems[work.problem];
      const bool is_new = work.problem != before.problem;
      if (is_new) {
        CopyWords(&problem, &slot.descriptors.problem, sizeof(ProblemDesc), lane, kWarpLanes);
      }
      if (is_new || work.batch != before.batch) {
        CopyWords(&problem.sequences[work.batch], &slot.descriptors.sequence, sizeof(SequenceDesc),
                  lane, kWarpLanes);
      }
      if (lane == 0) {
        ptx::StoreShared128(
            &slot.tile,
            make_uint4(static_cast<uint32_t>(work.problem), static_cast<uint32_t>(work.batch),
                       static_cast<uint32_t>(work.head), static_cast<uint32_t>(work.tile)));
        ptx::StoreShared32(&slot.first, static_cast<uint32_t>(first));
        if constexpr (kDrops) {
          ptx::StoreShared32(&slot.first_dropout,
                             ptx::LoadConstant32(params.first_rounds + number));
        }
      }
      ptx::SyncWarp();
      if (lane == 0) PrefetchKeys(work, work.problem != last_problem, slot);
      ptx::SyncWarp();
      PutRounds(work, lane, slot);
      last_problem = work.problem;
    }
    ptx::Arrive(&shared.full_work[n]);
    if (lane == 0 && reused) TellOf(written, runs);
  }
  ATTN_HD static uint32_t* WrittenTilesOf(const typename Layout::Slot& slot) {
    return GradientBounds(slot.descriptors.problem, slot.tile.batch, slot.tile.head) +
           kWrittenTiles;
  }
  ATTN_HD static void PrefetchKeys(const TileWork& work, bool is_new,
                                   const typename Layout::Slot& slot) {
    const ProblemDesc& problem = slot.descriptors.problem;
    const SequenceDesc& sequence = slot.descriptors.sequence;
    const int key = sequence.kv_begin + work.tile * Layout::kKeys;
    for (const MapOf map : {kMapOfK, kMapOfV}) {
      if (is_new) ptx::FenceMap(problem.maps + map);
#pragma unroll
      for (int n = 0; n < Layout::kPanels; ++n) {
        ptx::PrefetchBox(problem.maps + map, n * kPanelColumns, key, work.head, sequence.batch);
      }
    }
  }
  ATTN_HD static void PutRounds(const TileWork& work, int lane, typename Layout::Slot& slot) {
    const ProblemDesc& problem = slot.descriptors.problem;
    const SequenceDesc& sequence = slot.descriptors.sequence;
    const int first_key = work.tile * Layout::kKeys;
    const QueryVisits visits(problem, sequence, work, first_key,
                             MinInt(first_key + Layout::kKeys, sequence.kv_len));
    const int rounds = visits.Count(lane);
    if (lane != 0) return;
    const uint32_t* bounds = GradientBounds(problem, work.batch, work.head);
    ptx::StoreShared32(&slot.rounds, static_cast<uint32_t>(rounds));
    ptx::StoreShared32(&slot.non_finite, ptx::LoadConstant32(bounds + kNonFiniteRows));
    if (Layout::kZeroedAhead) WaitForZeros(problem, sequence, work.batch, work.head);
  }

  // ---- dQ's sums, by all blocks: 64 rows' after 64 rows' until there are none.
  ATTN_HD static void ZeroSums(const LaunchParams& params, int blocks, int lane, Shared& shared) {
    constexpr int kFloats = Layout::kZeros;
#pragma unroll 1
    for (int n = lane * 4; n < kFloats; n += kWarpLanes * 4) {
      ptx::StoreShared128(shared.zeros + n, make_uint4(0, 0, 0, 0));
    }
    ptx::FenceShared();
    ptx::SyncWarp();
    if (lane != 0) return;
    uint32_t* const counter = params.taken + 1;
    int next = static_cast<int>(ptx::AddGlobal(counter, 1));
#pragma unroll 1
    while (next < params.row_tile_count) {
      KeepPace(params, blocks, next);
      const TileWork tile = params.row_tiles[next];
      const ProblemDesc& p = params.problems[tile.problem];
      float* const to = p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
                        int64_t{tile.tile} * Layout::Dq::kBlockFloats;
#pragma unroll 1
      for (int n = 0; n < Layout::Dq::kBlockFloats; n += kFloats) {
        ptx::StoreInBulk(to + n, shared.zeros, kFloats * 4);
      }
      ptx::CommitBulk();
      next = static_cast<int>(ptx::AddGlobal(counter, 1));
      ptx::WaitForBulk();
      ptx::FenceBulk();
      ptx::AddRelease(GradientBounds(p, tile.batch, tile.head / p.group) + kZeroedBlocks, 1);
    }
  }
  // Waits, before the next-th tile of rows, until the launch has taken about as large a share of
  // its tiles of keys, but for two of each block, so that zeros are still in the L2 when sums are
  // added to them. It does not wait for long, since heads may come in another order.
  ATTN_HD static void KeepPace(const LaunchParams& params, int blocks, int next) {
    constexpr int kPatience = 12;
    const float keys_of_rows =
        static_cast<float>(params.tile_count) / static_cast<float>(params.row_tile_count);
    const int wanted = static_cast<int>(static_cast<float>(next) * keys_of_rows) - 2 * blocks;
#pragma unroll 1
    for (int n = 0; n < kPatience; ++n) {
      const int taken = ptx::LoadAcquire(reinterpret_cast<const int32_t*>(params.taken));
      if (taken - static_cast<int>(params.taken_before) >= wanted) return;
    }
  }
};

}  // namespace attnd::sm90
