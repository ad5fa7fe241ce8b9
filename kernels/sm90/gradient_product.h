// GradientProductKernel: some C += Aᵀ·B of 16-bit numbers for gradients of weights, in tiles of 128
// × 128 or 128 × 192 as the host says (kernels/dense/product_params.h), to the bits of sm80's
// ProductKernel: each part of the depth is one chain of sums from zero, which is added to C in
// float32 in the order of parts. One warpgroup brings: a thread claims items and loads their steps
// by tensor maps. Two consume, each 64 rows of the tile: while one waits for its products the
// other's run.
//
// C's numbers pass between memory and registers while the next part's products run, a chunk of
// columns a step: they come after an item's first part, and leave after its last one. An item waits
// for one that was claimed before, so claims in order leave nothing to wait for each other.
// Errors: none. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm90/tile_math.h"

namespace attnd::sm90 {

// A tile's columns are passed on to the next item in kSegments equal parts.
template <class Math, int kColumns, int kSegments>
struct GradientTiles {
  static constexpr int kConsumers = 2, kWarps = 4 * kConsumers;
  static constexpr int kThreads = kGroupThreads * (kConsumers + 1);
  static constexpr int kRows = kWideProductRows, kStep = kWideProductStep, kGroups = kColumns / 8;
  static constexpr int kStages = kColumns > 128 ? 5 : 7;
  static_assert(kRows == kConsumers * kGroupRows && kStep == kPanelColumns);
  struct alignas(1024) Stage {
    char a[kRows * kStep * 2], b[kColumns * kStep * 2];
  };
  // One block of the depth of an item, as consumers know it.
  struct alignas(16) Part {
    char* c;                                     // the tile's first number of C
    int32_t* turns;                              // the tile's words
    int32_t row_bytes, rows_left, columns_left;  // of C, from the tile's first number on
    int32_t steps;                               // 0: there are no more
    int32_t turn, next_turn;                     // of the item; both 0: it takes no turns
    uint32_t comes, leaves;                      // whether C does, after the part
  };
  // From the part before the one at hand to the last one that may have a step in a stage.
  static constexpr int kParts = kStages + 2 > 8 ? 16 : 8;
  struct alignas(1024) Shared {
    Stage stages[kStages];
    uint64_t full[kStages], empty[kStages];
    Part parts[kParts];
    // The bringing thread looks these up for each part.
    ProductDesc product;  // at hand
    GradientItem item;
  };
  static_assert(sizeof(Shared) <= 227 << 10);

  ATTN_HD static void Run(int count, const WideProductDesc* products, ThreadIndex at,
                          Shared& shared) {
    if (at.thread == 0) {
      for (int n = 0; n < kStages; ++n) {
        ptx::InitBarrier(&shared.full[n], 1);
        ptx::InitBarrier(&shared.empty[n], kWarps);
      }
      ptx::FenceBarriers();
      ptx::StoreShared32(&shared.parts[kParts - 1].comes, 0);
      ptx::StoreShared32(&shared.parts[kParts - 1].leaves, 0);
    }
    ptx::SyncThreads();
    const int group = ptx::Uniform(at.thread / kGroupThreads);
    if (group == 0) {
      ptx::KeepRegisters<(kColumns > 128 ? 24 : 40)>();
      if (at.thread == 0) Bring(products, count, at, shared);
    } else {
      ptx::TakeRegisters<(kColumns > 128 ? 240 : 232)>();
      Consume(at, group - 1, shared);
    }
  }

 private:
  using Sums = float[kGroups][4];
  // Columns of C that pass at a time, in groups of eight.
  static constexpr int kChunkGroups = 4, kChunks = kGroups / kChunkGroups;
  static constexpr int kSegmentChunks = kChunks / kSegments;
  static_assert(kSegments * kSegmentChunks == kChunks && kWarps * kSegments <= kWideGradientTurns);

  // The stage of a step, and the parity of the phase that its use ends.
  struct Turn {
    int slot = 0;
    uint32_t parity = 0;
    ATTN_HD void Next() {
      if (++slot < kStages) return;
      slot = 0;
      parity ^= 1;
    }
  };

  template <int kSize>
  ATTN_HD static void LoadStep(char* to, const TensorMap& map, int first, int depth,
                               uint64_t* barrier) {
#pragma unroll
    for (int panel = 0; panel < kSize / kPanelColumns; ++panel) {
      ptx::LoadBox(to + panel * PanelBytes(kStep), &map, first + panel * kPanelColumns, depth, 0, 0,
                   barrier);
    }
  }
  ATTN_HD static void Bring(const WideProductDesc* products, int count, ThreadIndex at,
                            Shared& shared) {
    const WideProductDesc* desc = nullptr;
    const auto claims = [&] { return reinterpret_cast<uint32_t*>(products->claims); };
    int item = static_cast<int>(ptx::AddGlobal(claims(), 1));
    uint32_t number = 0;  // of a part
    Turn turn;
#pragma unroll 1
    while (item < count) {
      const int next = static_cast<int>(ptx::AddGlobal(claims(), 1));
      const WideItem at_hand = WideItemOf(products, item);
      if (at_hand.desc != desc) {
        desc = at_hand.desc;
        ptx::FenceMap(&desc->a);
        ptx::FenceMap(&desc->b);
        shared.product = desc->product;
      }
      shared.item = GradientItemOf<kRows, kColumns>(shared.product, desc->cut, at_hand.number);
      const ProductPlace place = ProductPlaceOf<kRows, kColumns>(shared.product, shared.item.tile);
#pragma unroll 1
      for (int block = shared.item.first; block < shared.item.end; ++block, ++number) {
        ptx::WaitForPhase(&shared.empty[turn.slot], turn.parity ^ 1);
        const int begin = block * kProductBlockDepth;
        const int end = begin + Put(shared, block, shared.parts[number % kParts]) * kStep;
#pragma unroll 1
        for (int depth = begin; depth < end; depth += kStep) {
          Stage& stage = shared.stages[turn.slot];
          uint64_t* const full = &shared.full[turn.slot];
          ptx::WaitForPhase(&shared.empty[turn.slot], turn.parity ^ 1);
          ptx::ArriveExpecting(full, sizeof(Stage));
          LoadStep<kRows>(stage.a, desc->a, place.row, depth, full);
          LoadStep<kColumns>(stage.b, desc->b, place.column, depth, full);
          turn.Next();
        }
      }
      item = next;
    }
    // Each block claims one item too many; after the last of these nobody claims.
    if (item == count + at.blocks - 1) ptx::StoreRelease(products->claims, 0);
    ptx::WaitForPhase(&shared.empty[turn.slot], turn.parity ^ 1);
    ptx::StoreShared32(&shared.parts[number % kParts].steps, 0);
    ptx::Arrive(&shared.full[turn.slot]);
  }
  // Tells consumers of a part, and returns its steps, at least one.
  ATTN_HD static int Put(const Shared& shared, int block, Part& part) {
    const ProductDesc& p = shared.product;
    const GradientItem& item = shared.item;
    const ProductPlace place = ProductPlaceOf<kRows, kColumns>(p, item.tile);
    const int row_bytes = static_cast<int>(p.c_stride) * 4;
    const auto c = reinterpret_cast<uint64_t>(ptx::Offset(
        static_cast<const char*>(p.c) + int64_t{place.column} * 4, place.row, row_bytes));
    const auto turns = reinterpret_cast<uint64_t>(p.turns + item.tile * kWideGradientTurns);
    const int left = p.depth - block * kProductBlockDepth;
    const int steps = left >= kProductBlockDepth ? kProductBlockDepth / kStep
                      : left > 0                 ? (left + kStep - 1) / kStep
                                                 : 1;
    const auto word = [](int64_t value) { return static_cast<uint32_t>(value); };
    ptx::StoreShared128(&part.c,
                        make_uint4(word(c), word(c >> 32), word(turns), word(turns >> 32)));
    ptx::StoreShared128(&part.row_bytes, make_uint4(word(row_bytes), word(p.rows - place.row),
                                                    word(p.columns - place.column), word(steps)));
    ptx::StoreShared128(&part.turn,
                        make_uint4(word(item.first), word(item.is_last ? 0 : item.end),
                                   word(block == item.first), word(block + 1 == item.end)));
    return steps;
  }

  // Products of a step, which are at work when this returns.
  ATTN_HD static void BeginStep(Shared& shared, int group, const Turn& turn, Sums& sums) {
    ptx::WaitForPhase(&shared.full[turn.slot], turn.parity);
    const Stage& stage = shared.stages[turn.slot];
    const uint64_t a =
        ptx::MatrixOf(stage.a + group * PanelBytes(kStep), PanelBytes(kStep), 8 * kRowBytes);
    const uint64_t b = ptx::MatrixOf(stage.b, PanelBytes(kStep), 8 * kRowBytes);
    ptx::FenceProducts();
#pragma unroll
    for (int i = 0; i < kStep / kDepth; ++i) {
      Math::Across(sums, ptx::MovedMatrix(a, i * PanelBytes(kDepth)),
                   ptx::MovedMatrix(b, i * PanelBytes(kDepth)));
    }
    ptx::CommitProducts();
  }
  ATTN_HD static void EndStep(Shared& shared, int lane, Turn& turn, Sums& sums) {
    ptx::WaitForProducts<0>(sums);
    if (lane == 0) ptx::Arrive(&shared.empty[turn.slot]);
    turn.Next();
  }

  // The passage of a warp's sixteen rows of C after a part. A lane has four columns of two groups'
  // sixteen, of rows eight apart.
  class Passage {
   public:
    ATTN_HD Passage(const Part& part, int thread) : part_(part), thread_(thread) {}
    ATTN_HD bool IsSome() const { return Comes() || Leaves(); }
    // Chunk by chunk: its numbers are on their way in `words` when this returns.
    ATTN_HD void Start(int chunk, uint4 (&words)[4]) const {
      if (!Comes()) return;
      const uint4 turn = ptx::LoadShared128(&part_.turn);
      if (chunk % kSegmentChunks == 0 && turn.x != 0) {
        ptx::WaitForCount(reinterpret_cast<const uint32_t*>(Turns(chunk)),
                          static_cast<int>(turn.x));
      }
      const Lane at(part_, ptx::Keep(thread_));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        words[n] = make_uint4(0, 0, 0, 0);
        if (at.IsThere(chunk, n)) words[n] = ptx::LoadGlobal128(at.Place(chunk, n));
      }
    }
    ATTN_HD void End(int chunk, const uint4 (&words)[4], Sums& c) const {
      const bool is_odd = ptx::Keep(thread_) % 2 != 0;
      if (Comes()) {
#pragma unroll
        for (int n = 0; n < 4; ++n) Take(words[n], is_odd, n % 2, &c[GroupOf(chunk, n)]);
      }
      if (!Leaves()) return;
      const Lane at(part_, ptx::Keep(thread_));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 out = Give(is_odd, n % 2, &c[GroupOf(chunk, n)]);
        if (at.IsThere(chunk, n)) ptx::StoreGlobal128(at.Place(chunk, n), out);
      }
      const uint4 turn = ptx::LoadShared128(&part_.turn);
      if (chunk % kSegmentChunks != kSegmentChunks - 1 || (turn.x | turn.y) == 0) return;
      ptx::SyncWarp();
      if (ptx::Keep(thread_) % kWarpLanes == 0)
        ptx::StoreRelease(Turns(chunk), static_cast<int>(turn.y));
    }

   private:
    ATTN_HD bool Comes() const { return ptx::LoadShared32(&part_.comes) != 0; }
    ATTN_HD bool Leaves() const { return ptx::LoadShared32(&part_.leaves) != 0; }
    ATTN_HD int32_t* Turns(int chunk) const {
      const uint2 turns = ptx::LoadShared64(&part_.turns);
      return reinterpret_cast<int32_t*>(uint64_t{turns.y} << 32 | turns.x) +
             ptx::Keep(thread_) / kWarpLanes * kSegments + chunk / kSegmentChunks;
    }
    // Where the lane's numbers are.
    struct Lane {
      char* c;
      int row_bytes, rows_left, columns_left;
      ATTN_HD Lane(const Part& part, int thread) {
        const uint2 at = ptx::LoadShared64(&part.c);
        const uint4 sizes = ptx::LoadShared128(&part.row_bytes);
        const int row = thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
        const int column = thread % 2 * 8 + thread % 4 / 2 * 4;
        row_bytes = static_cast<int>(sizes.x);
        rows_left = static_cast<int>(sizes.y) - row;
        columns_left = static_cast<int>(sizes.z) - column;
        c = const_cast<char*>(
            ptx::Offset(reinterpret_cast<const char*>(uint64_t{at.y} << 32 | at.x) + column * 4,
                        row, row_bytes));
      }
      ATTN_HD bool IsThere(int chunk, int n) const {
        return n % 2 * 8 < rows_left && GroupOf(chunk, n) * 8 < columns_left;
      }
      ATTN_HD char* Place(int chunk, int n) const {
        return c + n % 2 * 8 * row_bytes + GroupOf(chunk, n) * 32;
      }
    };
    // Words n of a chunk: of two groups of columns, in the upper rows, in the lower ones.
    ATTN_HD static constexpr int GroupOf(int chunk, int n) {
      return chunk * kChunkGroups + n / 2 * 2;
    }
    // An even lane has four columns in memory of the first of two groups' accumulators, an odd
    // one of the second: neighbours exchange a pair.
    ATTN_HD static void Take(const uint4& words, bool is_odd, int half, float (*c)[4]) {
      const float own[2] = {ptx::BitsFloat(is_odd ? words.z : words.x),
                            ptx::BitsFloat(is_odd ? words.w : words.y)};
      const float other[2] = {ptx::BitsFloat(ptx::ShuffleXor(is_odd ? words.x : words.z, 1)),
                              ptx::BitsFloat(ptx::ShuffleXor(is_odd ? words.y : words.w, 1))};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        c[0][2 * half + e] = ptx::Add(is_odd ? other[e] : own[e], c[0][2 * half + e]);
        c[1][2 * half + e] = ptx::Add(is_odd ? own[e] : other[e], c[1][2 * half + e]);
      }
    }
    // And leaves what changes no sum.
    ATTN_HD static uint4 Give(bool is_odd, int half, float (*c)[4]) {
      uint32_t own[2], other[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t first = ptx::FloatBits(c[0][2 * half + e]);
        const uint32_t second = ptx::FloatBits(c[1][2 * half + e]);
        c[0][2 * half + e] = c[1][2 * half + e] = -0.0f;
        own[e] = is_odd ? second : first;
        other[e] = ptx::ShuffleXor(is_odd ? first : second, 1);
      }
      return is_odd ? make_uint4(other[0], other[1], own[0], own[1])
                    : make_uint4(own[0], own[1], other[0], other[1]);
    }

    const Part& part_;
    int thread_;  // of those that consume
  };

  ATTN_HD static void Consume(ThreadIndex at, int group, Shared& shared) {
    const int lane = at.thread % kWarpLanes;
    const int thread = at.thread - kGroupThreads;
    uint4 words[4];
    Sums sums, c;  // of the part, and of those before it
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][e] = -0.0f;  // changes no sum
    }
    Turn turn;
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      ptx::WaitForPhase(&shared.full[turn.slot], turn.parity);
      const int steps = static_cast<int>(ptx::LoadShared32(&shared.parts[number % kParts].steps));
      const Passage passage(shared.parts[(number + kParts - 1) % kParts], thread);
      if (steps == 0) {
        if (passage.IsSome()) PassAll(passage, words, c);
        return;
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][e] = 0;
      }
      int step = 0;
      if (passage.IsSome()) {
        if (steps > kChunks) {
#pragma unroll
          for (int chunk = 0; chunk <= kChunks; ++chunk) {
            BeginStep(shared, group, turn, sums);
            if (chunk > 0) passage.End(chunk - 1, words, c);
            if (chunk < kChunks) passage.Start(chunk, words);
            EndStep(shared, lane, turn, sums);
          }
          step = kChunks + 1;
        } else {
          PassAll(passage, words, c);
        }
      }
#pragma unroll 1
      for (; step < steps; ++step) {
        BeginStep(shared, group, turn, sums);
        EndStep(shared, lane, turn, sums);
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[i][e] = ptx::Add(c[i][e], sums[i][e]);
      }
    }
  }
  ATTN_HD static void PassAll(const Passage& passage, uint4 (&words)[4], Sums& c) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      passage.Start(chunk, words);
      passage.End(chunk, words, c);
    }
  }
};

template <class Math>
struct GradientProductKernel {
  using Narrow = GradientTiles<Math, kNarrowGradientColumns, 2>;
  using Wide = GradientTiles<Math, kWideGradientColumns, 1>;
  static constexpr int kThreads = Wide::kThreads;
  union Shared {
    typename Narrow::Shared narrow;
    typename Wide::Shared wide;
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const auto* products = static_cast<const WideProductDesc*>(params.dense);
    if (products->cut.tile_columns == kNarrowGradientColumns) {
      Narrow::Run(params.tile_count, products, at, shared.narrow);
    } else {
      Wide::Run(params.tile_count, products, at, shared.wide);
    }
  }
};

}  // namespace attnd::sm90
