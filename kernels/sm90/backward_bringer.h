// The warps of the backward kernel (backward.h) that bring: one loads tiles of Q and dO by tensor
// maps, one brings what belongs to their rows, and two make dropout's decisions. Errors: none.
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

  ATTN_HD static void Run(const Work& work, int warp, int lane, Shared& shared) {
    if (warp == 0) {
      if (lane == 0) Load(work, shared);
    } else if (warp == 1) {
      BringRows(work, lane, shared);
    } else if constexpr (Layout::Dropout::kDrops) {
      Decide(work, (warp - 2) * kWarpLanes + lane, shared);
    }
  }
  // The block's keys, by one thread, as early as descriptors and barriers allow.
  ATTN_HD static void LoadKeys(const ProblemDesc& problem, const SequenceDesc& sequence,
                               const TileWork& tile, Shared& shared) {
    const int key = sequence.kv_begin + tile.tile * Layout::kKeys;
    ptx::FenceMap(problem.maps + kMapOfK);
    LoadTile<Layout::kKeys>(problem, sequence, kMapOfK, tile.head, key, &shared.full_k, shared.k);
    ptx::FenceMap(problem.maps + kMapOfV);
    LoadTile<Layout::kKeys>(problem, sequence, kMapOfV, tile.head, key, &shared.full_v, shared.v);
  }
  // Zeros in place of infinities and NaN of 16 bytes; whether there were any.
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
  ATTN_HD static Place PlaceOf(const Work& work, const Cursor& at) {
    const uint32_t loaded = at.Load();
    return {at.Visit(work.visits, loaded), at.head(), at.Bitmap(loaded)};
  }
  ATTN_HD static bool IsDirty(const Work& work, const Place& place) {
    return work.non_finite || place.visit.First() + kQueries > work.sequence.q_len;
  }

  // ---- The loader, one thread.
  ATTN_HD static void Load(const Work& work, Shared& shared) {
    const SequenceDesc& s = work.sequence;
    for (MapOf map : {kMapOfQ, kMapOfDo}) ptx::FenceMap(work.problem.maps + map);
    Cursor at(work.visits);
#pragma unroll 1
    for (int round = 0; round < work.rounds; ++round, at.Advance(work.visits)) {
      const int stage = round % kStages;
      const uint32_t parity = Layout::Parity(round, kStages) ^ 1;
      const Place place = PlaceOf(work, at);
      if (IsDirty(work, place)) continue;
      const int row = s.q_begin + place.visit.First();
      ptx::WaitForPhase(&shared.empty_q[stage], parity);
      LoadTile<kQueries>(work.problem, s, kMapOfQ, place.head, row, &shared.full_q[stage],
                         shared.q[stage]);
      ptx::WaitForPhase(&shared.empty_d_o[stage], parity);
      LoadTile<kQueries>(work.problem, s, kMapOfDo, place.head, row, &shared.full_d_o[stage],
                         shared.d_o[stage]);
    }
  }
  template <int kRows>
  ATTN_HD static void LoadTile(const ProblemDesc& problem, const SequenceDesc& sequence, MapOf map,
                               int head, int row, uint64_t* barrier, char* to) {
    ptx::ArriveExpecting(barrier, Layout::kPanels * PanelBytes(kRows));
#pragma unroll
    for (int n = 0; n < Layout::kPanels; ++n) {
      ptx::LoadBox(to + n * PanelBytes(kRows), problem.maps + map, n * kPanelColumns, row, head,
                   sequence.batch, barrier);
    }
  }

  // ---- What belongs to rows.
  struct Rows {
    float stabilizer[kRowsOfLane], delta[kRowsOfLane], dq_factor[kRowsOfLane];
  };
  ATTN_HD static void BringRows(const Work& work, int lane, Shared& shared) {
    const float gain = PowerOfTwo(work.exponent - kProbabilityShift);
    const float of_key = PowerOfTwo(FixedPoint::KeyExponent(
        work.problem, GradientBounds(work.problem, work.batch, work.kv_head)));
    const float ungain = PowerOfTwo(-work.exponent);
    Cursor at(work.visits);
    uint32_t cleaned = 0;
    Place place = PlaceOf(work, at);
    Rows rows;
    LoadRows(work, place, lane, rows);
#pragma unroll 1
    for (int round = 0; round < work.rounds; ++round) {
      const int stage = round % kStages, slot = round % Layout::kPlaces;
      const uint32_t parity = Layout::Parity(round, kStages) ^ 1;
      const bool dirty = IsDirty(work, place);
      ptx::WaitForPhase(&shared.empty_q[stage], parity);
      if (dirty) {
        LoadDirty(work, kMapOfQ, place, lane, cleaned, shared.q[stage], shared, rows.stabilizer);
      }
      bool has_rests = false;
#pragma unroll
      for (int n = 0; n < kRowsOfLane; ++n) {
        const int row = n * kWarpLanes + lane;
        const float factor = rows.dq_factor[n];
        const float size = FixedPoint::RowFactor(ptx::Absolute(factor), ungain) * of_key;
        ptx::StoreSharedFloat(&shared.stabilizer[stage][row], rows.stabilizer[n]);
        ptx::StoreSharedFloat(&shared.dq_factor[slot][row], factor < 0 ? -size : size);
        has_rests |= factor < 0;
      }
      const uint32_t any_rests = ptx::VoteAny(has_rests);
      if (lane == 0) {
        ptx::StoreShared128(&shared.places[slot],
                            make_uint4(place.visit.word, static_cast<uint32_t>(place.head),
                                       place.bitmap, any_rests));
      }
      HandOver(dirty, lane, &shared.full_q[stage]);
      ptx::WaitForPhase(&shared.empty_d_o[stage], parity);
      if (dirty) {
        float unused[kRowsOfLane] = {};
        LoadDirty(work, kMapOfDo, place, lane, cleaned, shared.d_o[stage], shared, unused);
      }
#pragma unroll
      for (int n = 0; n < kRowsOfLane; ++n) {
        ptx::StoreSharedFloat(&shared.delta[stage][n * kWarpLanes + lane], rows.delta[n] * gain);
      }
      HandOver(dirty, lane, &shared.full_d_o[stage]);
      if (round + 1 == work.rounds) break;
      at.Advance(work.visits);
      place = PlaceOf(work, at);
      LoadRows(work, place, lane, rows);
    }
  }
  // The loader has announced a tile's bytes, unless the tile was dirty.
  ATTN_HD static void HandOver(bool dirty, int lane, uint64_t* full) {
    ptx::SyncWarp();
    if (lane != 0) return;
    ptx::Arrive(full);
    if (dirty) ptx::Arrive(full);
  }
  ATTN_HD static void LoadRows(const Work& work, const Place& place, int lane, Rows& rows) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const int64_t head = s.batch * p.lse_batch + place.head * p.lse_head + s.q_begin;
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

  // ---- Dropout. A generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4), which
  // four lanes of two consumer warps hold. One lane makes the eight calls that fill four lanes'
  // words: bit 2n + e + 8h + 16r of a word is of the query 16n + 8h + 2·(lane & 3) + e and the key
  // 8r + lane / 4.
  ATTN_HD static void Decide(const Work& work, int lane, Shared& shared) {
    const uint32_t threshold_bytes = work.problem.dropout_threshold * 0x01010101u;
    const int unit = lane >> 4, key = lane >> 2 & 3, query = lane & 3;
    const uint32_t column = static_cast<uint32_t>((work.first_key >> 5) + unit);
    Cursor at(work.visits);
#pragma unroll 1
    for (int round = 0; round < work.rounds; ++round) {
      const int slot = round % Layout::kKeepStages;
      const int row = at.Visit(work.visits, at.Load()).First();
      const DropoutColumn generator(DropoutStreamOf(work.At(at.head())), column);
      uint32_t words[2][2] = {};  // [bit 4 of the key][bit 0]
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t place = static_cast<uint32_t>((query * 2 + (n & 1)) * 4 + key);
        const PhiloxBlock bytes =
            generator.Bytes(static_cast<uint32_t>((row >> 4) + (n >> 1)), place);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t signs = KeepSigns(bytes.word[w], threshold_bytes) & 0x80808080u;
          const int high = w >> 1;  // bit 3 of the query
          words[w & 1][0] |= (signs & 0x00800080u) >> (7 - n) << (8 * high);
          words[w & 1][1] |= (signs & 0x80008000u) >> (15 - n) << (8 * high);
        }
      }
      ptx::WaitForPhase(&shared.empty_kept[slot], Layout::Parity(round, Layout::kKeepStages) ^ 1);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int consumer = (2 * unit + (w >> 1)) * kWarpLanes + (2 * key + (w & 1)) * 4 + query;
        ptx::StoreShared32(&shared.kept[slot][consumer], words[w >> 1][w & 1]);
      }
      ptx::SyncWarp();
      if (lane % kWarpLanes == 0) ptx::Arrive(&shared.full_kept[slot]);
      at.Advance(work.visits);
    }
  }
};

}  // namespace attnd::sm90
