// query_gradient.h runs after backward's large kernel: it brings dQ's sums, which lie in the order
// of its lanes, into rows of the call's element type, and NaN where rows are not finite. A block
// takes tile after tile of 64 rows; it is bound by memory. Errors: none.
#pragma once

#include "kernels/rules/backward_passes.h"

namespace attnd {

// DqHead holds the values that all rows of a tile share, looked up once.
template <int kColumns, class Rounding, class DqSums>
struct DqHead {
  const ProblemDesc& p;
  const SequenceDesc& s;
  const TileWork& tile;
  int gain, rest_bits;
  ATTN_HD DqHead(const LaunchParams& params, const TileWork& of)
      : p(params.problems[of.problem]),
        s(p.sequences[of.batch]),
        tile(of),
        gain(TileGain(p, of)),
        rest_bits(FixedPoint::RestBits(s.kv_len)) {}
  ATTN_HD static int TileGain(const ProblemDesc& p, const TileWork& of) {
    const int gain = GainOfTile(p, of.batch, of.head, of.tile);
    return gain == kNoGain ? 0 : gain;
  }
  // Returns the factor of a row of the block.
  ATTN_HD float FactorOf(int row) const {
    const int64_t index =
        s.batch * p.lse_batch + tile.head * p.lse_head + s.q_begin + tile.tile * kDqBlockRows + row;
    return ptx::LoadConstantFloat(p.dq_factor + index);
  }
  // The sums of a row with this factor are dQ / scale times 2^this.
  ATTN_HD int SumExponent(float of_row) const {
    if constexpr (!DqSums::kFixedPoint) return gain;
    const float factor = FixedPoint::RowFactor(ptx::Absolute(of_row), PowerOfTwo(-gain));
    return gain + FloatExponent(factor);
  }
  // Bits of 32 columns of a row whose sums are not finite.
  ATTN_HD uint32_t MarksOf(int row, int word) const {
    return ptx::LoadConstant32(DqNonFinite<kColumns>(p, tile.batch, tile.head, row) + word);
  }
};

// An integer and its second one, as a float.
ATTN_HD float SumWithRest(uint32_t sum, uint32_t rest, int rest_bits) {
  const int64_t wide = static_cast<int32_t>(sum);
  return static_cast<float>((wide << rest_bits) + static_cast<int32_t>(rest)) *
         PowerOfTwo(-rest_bits);
}
// Returns two 16-bit numbers: NaN where a bit is set, else 0.
ATTN_HD uint32_t NanOfPair(uint32_t marks) {
  return (marks & 1 ? 0x7fffu : 0u) | (marks & 2 ? 0x7fff0000u : 0u);
}
// Puts NaN into dK and dV where rows of the tile are not finite. 256 threads call it.
template <class Element>
ATTN_HD void RestoreRows(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                         int warp, int lane) {
  const uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
  if (!ptx::LoadConstant32(bounds + kNonFiniteRows)) return;
  const NonFiniteRows<Element> rows(p, s, tile);
  const int first = tile.tile * kDqBlockRows, end = MinInt(first + kDqBlockRows, s.q_len);
  for (int row = first + warp; row < end; row += 8) rows.Restore(row, lane);
}

// dQ's sums into place: 64 rows of a query head. `Dq` says where the sums of kColumns columns lie:
//   kParts, kSums         sums of a lane: parts of kOut columns, kSums each
//   kFloats, kBlockFloats numbers of a part and of 64 queries
//   Query, Column(n, warp, lane)   of sum n; 2n and 2n + 1 are neighbours in a row
template <class Dq, class Element, class Rounding, class DqSums>
struct DqKernel {
  using Head = DqHead<Dq::kColumns, Rounding, DqSums>;
  static constexpr int kThreads = 256;
  static constexpr int kColumns = Dq::kColumns;
  static constexpr int kWords = Element::kBytes / 2;          // of two numbers
  static constexpr int kChunkColumns = 16 / Element::kBytes;  // of 16 bytes
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int kLaneWords = Dq::kSums / 2 * kWords;
  struct Shared {
    // Rows start in different banks.
    alignas(16) uint32_t rows[kDqBlockRows][kColumns / 2 * kWords + 4];
    uint32_t exponents[kDqBlockRows];  // of sums
    alignas(16) uint32_t marked[8];    // whether a warp has met marks of sums that are not finite
    uint32_t has_rests[kDqBlockRows / 32];  // whether 32 of the rows have second integers
  };

  // A block's tiles are a step apart, the last ones first: of those the L2 still has the sums.
  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const int lane = at.thread & 31, warp = at.thread >> 5;
    const TileWork* tile = params.tiles + (params.tile_count - 1 - at.block);
    float sums[Dq::kSums];
    Load(SumsOf(params, *tile, warp, lane), sums);
#pragma unroll 1
    while (tile != nullptr) {
      const TileWork* next = tile - params.tiles >= at.blocks ? tile - at.blocks : nullptr;
      RunTile(params, *tile, next, at.thread, sums, shared);
      tile = next;
    }
  }

 private:
  // This lane's first sum of a tile.
  ATTN_HD static const float* SumsOf(const LaunchParams& params, const TileWork& tile, int warp,
                                     int lane) {
    const ProblemDesc& p = params.problems[tile.problem];
    return p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
           int64_t{tile.tile} * Dq::kBlockFloats + warp * Dq::kSums * 32 + lane;
  }
  // `sums` is the tile's first part on entry, and on exit that of `next`, which is under way while
  // this one is written.
  ATTN_HD static void RunTile(const LaunchParams& params, const TileWork& tile,
                              const TileWork* next, int thread, float (&sums)[Dq::kSums],
                              Shared& shared) {
    const int lane = thread & 31, warp = thread >> 5;
    const Head head(params, tile);
    const TileWork after = next == nullptr ? tile : *next;
    const int rows = MinInt(head.s.q_len - tile.tile * kDqBlockRows, kDqBlockRows);
    if (thread < kDqBlockRows) {
      const float factor = thread < rows ? head.FactorOf(thread) : 1;
      ptx::StoreShared32(&shared.exponents[thread],
                         static_cast<uint32_t>(head.SumExponent(factor)));
      const bool has_rests =
          ptx::VoteAny(head.p.dq_rest != 0 && (!head.p.dq_rests_by_row || factor < 0));
      if (lane == 0) ptx::StoreShared32(&shared.has_rests[warp], has_rests);
    }
    const bool marked = ptx::VoteAny(DqSums::kFixedPoint && MeetsMarks(head, thread));
    if (lane == 0) ptx::StoreShared32(&shared.marked[warp], marked);
    ptx::SyncThreads();
    const bool has_rests =
        (ptx::LoadShared32(&shared.has_rests[0]) | ptx::LoadShared32(&shared.has_rests[1])) != 0;
    const bool is_any_marked = AreAnyMarked(shared);
    const float* const from = SumsOf(params, tile, warp, lane);
#pragma unroll 1
    for (int part = 0; part < Dq::kParts; ++part) {
      ToFloats(head, has_rests, from + part * Dq::kFloats, sums);
      uint32_t words[kLaneWords];
      Pack(head, warp, lane, sums, shared, words);
      if (part + 1 < Dq::kParts) {
        Load(from + (part + 1) * Dq::kFloats, sums);
      } else if (next != nullptr) {
        Load(SumsOf(params, after, warp, lane), sums);
      }
      Put(part * Dq::kOut, warp, lane, words, shared);
    }
    ptx::SyncThreads();
    for (int n = thread; n < rows * kChunks; n += kThreads) {
      WriteChunk(head, n / kChunks, n % kChunks, is_any_marked, shared);
    }
    RestoreRows<Element>(head.p, head.s, tile, warp, lane);
  }

  // Tells whether this thread's share of the block's rows has sums that are not finite.
  ATTN_HD static bool MeetsMarks(const Head& head, int thread) {
    constexpr int kWords = kColumns / 32;
    uint32_t marks = 0;
#pragma unroll
    for (int n = thread; n < kDqBlockRows * kWords; n += kThreads) {
      marks |= head.MarksOf(head.tile.tile * kDqBlockRows + n / kWords, n % kWords);
    }
    return marks != 0;
  }
  ATTN_HD static void Load(const float* from, float (&sums)[Dq::kSums]) {
#pragma unroll
    for (int n = 0; n < Dq::kSums; ++n) sums[n] = ptx::LoadGlobalFloat(from + n * 32);
  }
  // Integers to floats; `from`: where they were loaded.
  ATTN_HD static void ToFloats(const Head& head, bool has_rests, const float* from,
                               float (&sums)[Dq::kSums]) {
    if constexpr (!DqSums::kFixedPoint) return;
    if (has_rests) {
#pragma unroll
      for (int n = 0; n < Dq::kSums; ++n) {
        sums[n] = SumWithRest(ptx::FloatBits(sums[n]),
                              ptx::LoadGlobal32(from + head.p.dq_rest + n * 32), head.rest_bits);
      }
    } else {
#pragma unroll
      for (int n = 0; n < Dq::kSums; ++n) {
        sums[n] = static_cast<float>(static_cast<int32_t>(ptx::FloatBits(sums[n])));
      }
    }
  }
  // A lane's sums as numbers of dQ.
  ATTN_HD static void Pack(const Head& head, int warp, int lane, const float (&sums)[Dq::kSums],
                           const Shared& shared, uint32_t (&words)[kLaneWords]) {
#pragma unroll
    for (int n = 0; n < Dq::kSums; n += 2) {
      const auto exponent =
          static_cast<int>(ptx::LoadShared32(&shared.exponents[Dq::Query(n, warp, lane)]));
      const GradientWriter writer(head.p, head.p.scale * (1.0f + Rounding::kLoss),
                                  head.p.d_q_exponent - exponent);
      if constexpr (kWords == 2) {
        const uint2 both = writer.Floats(sums[n], sums[n + 1]);
        words[n] = both.x;
        words[n + 1] = both.y;
      } else {
        words[n / 2] = writer.Pack(sums[n], sums[n + 1]);
      }
    }
  }
  // Into the columns from `first` on.
  ATTN_HD static void Put(int first, int warp, int lane, const uint32_t (&words)[kLaneWords],
                          Shared& shared) {
#pragma unroll
    for (int n = 0; n < Dq::kSums; n += 2) {
      const int column = first + Dq::Column(n, warp, lane);
      uint32_t* const to = &shared.rows[Dq::Query(n, warp, lane)][column / 2 * kWords];
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        ptx::StoreShared32(to + word, words[n / 2 * kWords + word]);
      }
    }
  }
  ATTN_HD static void WriteChunk(const Head& head, int row, int chunk, bool is_any_marked,
                                 const Shared& shared) {
    const ProblemDesc& p = head.p;
    if (chunk >= p.qk_chunks) return;
    const int own_row = head.tile.tile * kDqBlockRows + row;
    uint4 words = ptx::LoadShared128(&shared.rows[row][chunk * 4]);
    if (is_any_marked) {
      const int column = chunk * kChunkColumns;
      const uint32_t marks = head.MarksOf(own_row, column / 32) >> (column % 32);
      constexpr int kStep = 2 / kWords;  // numbers of a word
      words = make_uint4(words.x | NanOf(marks), words.y | NanOf(marks >> kStep),
                         words.z | NanOf(marks >> 2 * kStep), words.w | NanOf(marks >> 3 * kStep));
    }
    char* out = RowOf(p.d_q, head.s.batch, head.tile.head, int64_t{head.s.q_begin} + own_row);
    ptx::StoreGlobal128(out + chunk * 16, words);
  }
  ATTN_HD static bool AreAnyMarked(const Shared& shared) {
    if constexpr (!DqSums::kFixedPoint) return false;
    const uint4 a = ptx::LoadShared128(&shared.marked[0]);
    const uint4 b = ptx::LoadShared128(&shared.marked[4]);
    return (a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) != 0;
  }
  // Returns the numbers of a word: NaN where a bit is set, else 0.
  ATTN_HD static uint32_t NanOf(uint32_t marks) {
    if constexpr (kWords == 2) return marks & 1 ? 0x7fffffffu : 0u;
    return NanOfPair(marks);
  }
};

}  // namespace attnd
