// Dropout's decisions, made ahead of the kernels that multiply, which have neither warps nor
// registers left for a generator. Errors: none.
//   ForwardDropoutBits  for forward.h: a block has its tile of queries. Of a visit it writes two
//                       words for each lane that multiplies, which reads them by AheadDropout
//   DropoutBitsKernel   for backward.h: a block has a tile of keys, a warp every eighth of its
//                       rounds. Of a round it writes a word for each lane that multiplies
//
// Forward: a generator call serves the scores that one lane holds of 16 queries and 32 keys. A word
// is of two calls, the second in the upper half of each byte. Bit 8·b + 4·call + w is the sign of
// byte b of word w: neighbours stand in bytes of their own, from whose signs one instruction makes
// a mask for two (Mask).
//
// Backward: a generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4), which four
// lanes of two consumer warps hold. For 32 keys a lane makes four calls: of half of the queries,
// for two words of each of two consumer warps. Lanes 16 apart exchange halves of them. Bit 16e + 8r
// + 4h + n of a word is of the query 16n + 8h + 2·(lane & 3) + e and the key 8r + lane / 4:
// neighbours stand in bytes of their own, from whose signs one instruction makes a mask for two
// (Mask).
#pragma once

#include "kernels/sm90/backward_layout.h"

namespace attnd::sm90 {

// The sign of each byte tells whether it is at least the threshold, whose lower seven bits
// `low_bits` holds; attnd::KeepSigns, faster where it is known on which side of 128 that is.
template <bool kMostlyKeeps>
ATTN_HD uint32_t KeepSigns(uint32_t bytes, uint32_t low_bits) {
  const uint32_t low7 = (bytes | 0x80808080u) - low_bits;
  return (kMostlyKeeps ? bytes | low7 : bytes & low7) & 0x80808080u;
}
ATTN_HD uint32_t LowBits(const ProblemDesc& problem) {
  return ptx::Permute(problem.dropout_threshold & 127, 0, 0);
}

// ---- Forward.
// Of a visit: 128 keys for each of a block's queries. Words of 16 queries stand one lane's after
// the other's.
inline constexpr int kForwardKeys = 128, kForwardLaneWords = 2;
ATTN_HD constexpr int ForwardDropoutWords(int rows) { return rows * kForwardKeys / 32; }

template <int kBlockRows>
struct ForwardDropoutBits {
  static constexpr int kRowGroups = kBlockRows / kGroupRows, kStep = 4;  // a warp's rows; visits
  static constexpr int kThreads = kRowGroups * kStep * kWarpLanes;
  using Shared = Descriptors;

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared);
    ptx::SyncThreads();
    const int warp = ptx::Uniform(at.thread / kWarpLanes), lane = at.thread % kWarpLanes;
    const int first_row = tile.tile * kBlockRows, group = warp % kRowGroups;
    const int end_row = MinInt(first_row + kBlockRows, shared.sequence.q_len);
    const ListedTiles visits(
        KeyTiles(VisibilityOf(shared.sequence), first_row, end_row, kForwardKeys),
        shared.problem.tile_lists, 0, tile.batch, tile.head, tile.tile);
    const DropoutPlane plane(
        DropoutStreamOf({shared.problem, shared.sequence, tile.batch, tile.head, {}}));
    DropoutPlane::Row rows[kRowBlocks];
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      rows[n] = plane.RowOf(static_cast<uint32_t>((first_row + group * kGroupRows) / 16 + n),
                            static_cast<uint32_t>(lane));
    }
    const bool mostly_keeps = shared.problem.dropout_threshold < 128;
    const uint32_t low_bits = LowBits(shared.problem);
    constexpr int kWords = ForwardDropoutWords(kBlockRows);
    uint32_t* const to = params.dropout_bits +
                         int64_t{ptx::LoadConstant32(params.first_rounds + at.block)} * kWords +
                         ForwardDropoutWords(group * kGroupRows) + lane * kForwardLaneWords;
#pragma unroll 1
    for (int n = warp / kRowGroups; n < visits.count(); n += kStep) {
      const int key = visits.Visit(visits.Load(n)).First();
      if (mostly_keeps) {
        Decide<true>(plane, rows, key, low_bits, to + int64_t{n} * kWords);
      } else {
        Decide<false>(plane, rows, key, low_bits, to + int64_t{n} * kWords);
      }
    }
  }

 private:
  static constexpr int kRowBlocks = kGroupRows / 16, kColumnBlocks = kForwardKeys / 32;
  template <bool kMostlyKeeps>
  ATTN_HD static void Decide(const DropoutPlane& plane, const DropoutPlane::Row (&rows)[kRowBlocks],
                             int key, uint32_t low_bits, uint32_t* to) {
    DropoutPlane::Column columns[kColumnBlocks];
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      columns[n] = plane.ColumnOf(static_cast<uint32_t>((key >> 5) + n));
    }
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      uint32_t words[kForwardLaneWords] = {};
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const PhiloxBlock bytes = plane.Bytes(rows[m], columns[n]);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[n / 2] = (words[n / 2] >> 1) + KeepSigns<kMostlyKeeps>(bytes.word[w], low_bits);
        }
      }
      ptx::StoreGlobal64(to + ForwardDropoutWords(m * 16), {words[0], words[1]});
    }
  }
};

// Policies of forward (sm80/forward_rows.h), which has loaded a visit's decisions when it asks for
// those of a unit of keys counted from the visit's first. `words`: a lane's of its first visit.
struct NoDropout {
  static constexpr bool kDrops = false;
  struct Keep {};
  ATTN_HD explicit NoDropout(const uint32_t* /*words*/) {}
  ATTN_HD void Load(int /*stride*/) {}
  ATTN_HD Keep Of(int, int, int) const { return {}; }
  ATTN_HD static uint32_t Mask(const Keep&, int, int) { return 0xffffffffu; }
};
class AheadDropout {
 public:
  static constexpr bool kDrops = true;
  struct Keep {
    uint32_t word;
    int first_bit;
  };
  ATTN_HD explicit AheadDropout(const uint32_t* words) : next_(words), words_() {}
  // The next visit's, which stand so many words on.
  ATTN_HD void Load(int stride) {
    words_ = ptx::LoadGlobal64(next_);
    next_ += stride;
  }
  ATTN_HD Keep Of(int /*first_row*/, int key, int /*lane*/) const {
    return {key < 64 ? words_.x : words_.y, key >> 5 & 1 ? 4 : 0};
  }
  // Returns ones where it keeps the lane's two scores of row r and group t of 8 keys, 16 bits each.
  ATTN_HD static uint32_t Mask(const Keep& keep, int r, int t) {
    const int bit = keep.first_bit + 2 * r + (t >> 1);
    return ptx::Permute(keep.word << (7 - bit), 0, t & 1 ? 0xbbaau : 0x9988u);
  }

 private:
  const uint32_t* next_;
  uint2 words_;
};

// ---- Backward.
struct DropoutBitsKernel {
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpLanes;
  using Shared = Descriptors;

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const TileWork tile = params.tiles[at.block];
    BringDescriptors(params, tile, at.thread, kThreads, shared);
    ptx::SyncThreads();
    const int warp = ptx::Uniform(at.thread / kWarpLanes), lane = at.thread % kWarpLanes;
    const int first_key = tile.tile * kBackwardKeys;
    const QueryVisits visits(shared.problem, shared.sequence, tile, first_key,
                             MinInt(first_key + kBackwardKeys, shared.sequence.kv_len));
    uint32_t* const to =
        params.dropout_bits +
        int64_t{ptx::LoadConstant32(params.first_rounds + at.block)} * kDropoutWords;
    const int rounds = visits.Count(lane);
    const bool mostly_keeps = shared.problem.dropout_threshold < 128;
    VisitCursor<true> cursor(visits, warp);
#pragma unroll 1
    for (int round = warp; round < rounds; round += kWarps) {
      const ScoreContext context = {shared.problem, shared.sequence, tile.batch, cursor.head(), {}};
      const int row = cursor.Visit(visits, cursor.Load()).First();
      if (mostly_keeps) {
        Decide<true>(context, row, first_key, lane, to + int64_t{round} * kDropoutWords);
      } else {
        Decide<false>(context, row, first_key, lane, to + int64_t{round} * kDropoutWords);
      }
      cursor.Advance(visits, kWarps);
    }
  }
  // Tells whether a word keeps score (t, e) of a lane's.
  ATTN_HD static bool IsKept(uint32_t word, int t, int e) {
    return word >> (16 * (e & 1) + 8 * (e >> 1) + BitOf(t)) & 1;
  }
  // The group of queries of bit n of a byte.
  ATTN_HD static constexpr int GroupOf(int n) { return 2 * (n & 3) + (n >> 2); }
  // Returns ones where it keeps (t, 2r) and (t, 2r + 1), 16 bits each.
  ATTN_HD static uint32_t Mask(uint32_t word, int t, int r) {
    return ptx::Permute(word << (7 - BitOf(t)), 0, r == 0 ? 0xaa88u : 0xbb99u);
  }

 private:
  ATTN_HD static constexpr int BitOf(int t) { return 4 * (t & 1) + (t >> 1); }
  template <bool kMostlyKeeps>
  ATTN_HD static void Decide(const ScoreContext& context, int row, int key, int lane,
                             uint32_t* to) {
    const uint32_t low_bits = LowBits(context.problem);
    const int half = lane >> 4, query = lane & 3, key_pair = lane >> 2 & 3;
    const DropoutPlane plane(DropoutStreamOf(context));
    DropoutPlane::Row rows[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      rows[n] = plane.RowOf(static_cast<uint32_t>((row >> 4) + n),
                            static_cast<uint32_t>(query * 8 + half * 4 + key_pair));
    }
    to += half * 4 + key_pair * 8 + query;
#pragma unroll
    for (int unit = 0; unit < kBackwardKeys / 32; ++unit) {
      const DropoutPlane::Column column = plane.ColumnOf(static_cast<uint32_t>((key >> 5) + unit));
      uint32_t signs[4] = {};  // of four calls in the upper half of each byte, the last one's first
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const PhiloxBlock bytes = plane.Bytes(rows[n], column);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          signs[w] = (signs[w] >> 1) + KeepSigns<kMostlyKeeps>(bytes.word[w], low_bits);
        }
      }
      // Bits 0 and 3 of a key.
      ptx::StoreGlobal32(to + 2 * unit * kWarpLanes, Joined(signs[0], signs[2], half));
      ptx::StoreGlobal32(to + (2 * unit + 1) * kWarpLanes, Joined(signs[1], signs[3], half));
    }
  }
  // `low` and `high` are those of queries whose bit 3 is 0 and 1.
  ATTN_HD static uint32_t Joined(uint32_t low, uint32_t high, int half) {
    const uint32_t own = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
    const uint32_t other = ptx::ShuffleXor(own, 16);
    return half == 0 ? ptx::Permute(own, other, 0x6420u) : ptx::Permute(other, own, 0x7531u);
  }
};

}  // namespace attnd::sm90
