// Descriptors, parts and tile lists against what a Problem says, element by element.
#include "kernels/cuda/layout/launch_layout.h"

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "attention/random_problem.h"
#include "attention/score_rule.h"
#include "gtest/gtest.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/cuda/layout/tile_work.h"
#include "kernels/rules/mask_words.h"

namespace attnd::cuda {
namespace {

Problem Simple() {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = 300;
  p.kv_len = 200;
  p.qk_head_dim = 20;
  p.v_head_dim = 64;
  p.element = ElementType::kFloat16;
  return p;
}

TEST(Sequences, SeeTheKeysThatTheProblemSays) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 3000});
    std::vector<SequenceDesc> sequences = SequencesOf(p);
    ASSERT_EQ(sequences.size(), static_cast<size_t>(p.batch));
    for (int64_t b = 0; b < p.batch; ++b) {
      const SequenceDesc& s = sequences[b];
      Sequence want = p.SequenceAt(b);
      ASSERT_EQ(s.q_len, want.q_len) << "seed " << seed;
      for (int row = 0; row < s.q_len; ++row) {
        KeyRange keys = p.VisibleRange(want, row);
        Range got = VisibleKeys({s.q_len, s.kv_len, s.low, s.high}, row, row + 1);
        if (keys.begin >= keys.end) {
          EXPECT_LE(got.end, got.begin) << "seed " << seed << " row " << row;
        } else {
          EXPECT_EQ(got.begin, keys.begin) << "seed " << seed << " row " << row;
          EXPECT_EQ(got.end, keys.end) << "seed " << seed << " row " << row;
        }
      }
    }
  }
}

TEST(Describe, PointsAtThePartsOwnRows) {
  Problem p = Simple();
  p.element = ElementType::kBFloat16;
  p.shard = {3, 8, 16};
  p.dropout = {10, 1, 2};
  ArenaLayout arena;
  CallLayout at = LayOutTensors(p, RegionUse::kInput, arena);
  LayOutGradients(at, {.tile_head_dim = 64, .rests = DqRests::kOfAllRows}, arena);
  std::vector<Part> parts = PartsOf(p, 0);
  ASSERT_EQ(parts.size(), 4u);  // (batch entry, KV head) pairs
  const uint64_t base = 1 << 20;
  const Part& last = parts[3];
  ProblemDesc desc = Describe(at, last, base);
  EXPECT_EQ(desc.q_heads, 2);
  EXPECT_EQ(desc.kv_heads, 1);
  auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  // Rows of 20 numbers lie in 24; batch entry 1, query head 2, KV head 1.
  EXPECT_EQ(address(desc.q.data), base + at.q + (1 * 4 + 2) * 300 * 24 * 2);
  EXPECT_EQ(address(desc.k.data), base + at.k + (1 * 2 + 1) * 200 * 24 * 2);
  EXPECT_EQ(address(desc.v.data), base + at.v + (1 * 2 + 1) * 200 * 64 * 2);
  EXPECT_EQ(address(desc.lse), base + at.lse + (1 * 4 + 2) * 300 * 4);
  EXPECT_EQ(address(desc.sequences), base + at.sequences + sizeof(SequenceDesc));
  EXPECT_EQ(address(desc.dq_sums), base + at.dq_sums + (1 * 4 + 2) * at.dq_head * 4);
  EXPECT_EQ(desc.qk_chunks, 3);
  EXPECT_EQ(desc.v_chunks, 8);
  EXPECT_EQ(desc.dropout_head, p.DropoutHeadIndex(1, 2));
}

TEST(Describe, FoldsExponentsIntoTheScale) {
  Problem p = Simple();
  p.scale = 0.5f;
  ArenaLayout arena;
  CallLayout at = LayOutTensors(p, RegionUse::kOutput, arena);
  Part part = PartsOf(p, 0)[0];
  part.exponents = {.q = 3, .k = -5};
  EXPECT_EQ(Describe(at, part, 0).scale, 0.125f);
}

TEST(Parts, StayTogetherWhereABiasGradientSumsOverThem) {
  Problem p = Simple();
  p.element = ElementType::kBFloat16;
  p.bias = Bias{ElementType::kFloat32, {2, 4, 300, 200}, true};
  EXPECT_EQ(PartsOf(p, 0).size(), 4u);
  p.bias->shape.heads = 1;
  EXPECT_EQ(PartsOf(p, 0).size(), 1u);
  p.bias->want_gradient = false;
  EXPECT_EQ(PartsOf(p, 0).size(), 4u);
}

// Every tile of every head once, in the order that the kernels ask for.
TEST(Tiles, CoverEveryRowOfEveryHeadOnceLongestFirst) {
  Problem dense = Simple(), packed = Simple();
  dense.causal = true;
  packed.layout = Layout::kPackedThd;
  packed.batch = 3;
  packed.q_len = packed.kv_len = 500;
  packed.cu_seqlens_q = packed.cu_seqlens_k = {0, 200, 200, 500};
  std::vector<const Problem*> problems = {&dense, &packed};
  std::vector<Part> parts = PartsOf(dense, 0);
  for (const Part& part : PartsOf(packed, 1)) parts.push_back(part);
  std::set<std::tuple<int, int, int, int>> seen;
  int64_t previous = INT64_MAX;
  for (const TileWork& tile : ForwardTiles(problems, parts, {128, 32, 64, 1}, {}).tiles) {
    EXPECT_TRUE(seen.emplace(tile.problem, tile.batch, tile.head, tile.tile).second);
    const SequenceDesc s = SequencesOf(*problems[tile.problem])[tile.batch];
    int begin = tile.tile * 128, end = std::min(begin + 128, s.q_len);
    ASSERT_LT(begin, s.q_len);
    Range keys = VisibleKeys({s.q_len, s.kv_len, s.low, s.high}, begin, end);
    EXPECT_LE(keys.end - keys.begin, previous);
    previous = keys.end - keys.begin;
  }
  EXPECT_EQ(seen.size(), 2u * 4 * 3 + 4 * (2 + 0 + 3));
}

TEST(Tiles, OfHeadsWhoseKeysAndValuesFitTheL2StandTogether) {
  Problem p = Simple();
  p.causal = true;
  p.batch = 1;
  p.q_heads = p.kv_heads = 64;
  p.q_len = p.kv_len = 4096;
  p.qk_head_dim = p.v_head_dim = 128;
  const auto tiles = ForwardTiles({&p}, PartsOf(p, 0), {128, 128, 128, 1}, {}).tiles;
  ASSERT_EQ(tiles.size(), 64u * 32);
  constexpr size_t kHeads = 4;  // of 2 MiB in 8
  for (size_t at = 0; at + kHeads * 32 <= tiles.size(); at += kHeads * 32) {
    std::set<int> heads;
    for (size_t n = at; n < at + kHeads * 32; ++n) heads.insert(tiles[n].head);
    EXPECT_EQ(heads.size(), kHeads);
    EXPECT_EQ(tiles[at].tile, 31) << "the longest first";
  }
}

TEST(Tiles, OfKeysVisitMostRowsFirst) {
  Problem p = Simple();
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  std::vector<const Problem*> problems = {&p};
  std::set<std::tuple<int, int, int, int>> seen;
  int64_t previous = INT64_MAX;
  for (const TileWork& tile : BackwardTiles(problems, PartsOf(p, 0), {32, 64, 64, 1}, {}).tiles) {
    EXPECT_TRUE(seen.emplace(tile.problem, tile.batch, tile.head, tile.tile).second);
    const SequenceDesc s = SequencesOf(p)[tile.batch];
    const int begin = tile.tile * 64;
    Range rows =
        RowsThatSee({s.q_len, s.kv_len, s.low, s.high}, begin, std::min(begin + 64, s.kv_len));
    EXPECT_LE(rows.end - rows.begin, previous);
    previous = rows.end - rows.begin;
  }
  EXPECT_EQ(seen.size(), 4u * 4) << "200 keys are four tiles";
}

TEST(Tiles, ListBiasGradientsOnceWhereTheyAreBroadcast) {
  Problem p = Simple();
  p.bias = Bias{ElementType::kFloat32, {1, 4, 300, 1}, true};
  std::vector<const Problem*> problems = {&p};
  EXPECT_EQ(BiasTiles(problems, PartsOf(p, 0)).size(), 4u * 19);
  p.bias->want_gradient = false;
  EXPECT_TRUE(BiasTiles(problems, PartsOf(p, 0)).empty());
}

TEST(Tiles, ListEachLineOfAMaskOnceWhereverPartsShareIt) {
  const MaskTiling by_rows = {128, 32, false}, by_keys = {64, 64, true};
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    Problem p = Simple();
    p.element = ElementType::kBFloat16;  // a part for each (batch entry, KV head)
    p.bool_mask = BoolMask{{broadcast & 1 ? p.batch : 1, broadcast & 2 ? p.q_heads : 1,
                            broadcast & 4 ? 300 : 1, broadcast & 8 ? 200 : 1}};
    const std::vector<Part> parts = PartsOf(p, 0);
    for (const MaskTiling& tiling : {by_rows, by_keys}) {
      ArenaLayout arena;
      CallLayout at = LayOutTensors(p, RegionUse::kInput, arena);
      LayOutTileLists(at, tiling, nullptr, arena);
      LayOutConstants(at, arena);
      std::set<uintptr_t> lines, bitmaps;
      const std::vector<TileWork> tiles = MaskLineTiles({&at, 1}, parts);
      const int64_t words = BitmapWords(tiling.rows, tiling.keys);
      for (const TileWork& tile : tiles) {
        const TileLists lists = Describe(at, parts[tile.problem], 0).tile_lists;
        EXPECT_EQ(lists.line_tiles,
                  tiling.by_keys ? (broadcast & 4 ? 5 : 1) : (broadcast & 8 ? 7 : 1));
        const int64_t line =
            (tile.batch * lists.batch + tile.head * lists.head) * lists.plan_lines + tile.tile;
        const int64_t end = (line + 1) * lists.line_tiles;
        EXPECT_TRUE(lines.insert(reinterpret_cast<uintptr_t>(lists.lines + line)).second);
        EXPECT_TRUE(
            bitmaps.insert(reinterpret_cast<uintptr_t>(lists.bitmaps + end * words)).second);
        EXPECT_LE(reinterpret_cast<uintptr_t>(lists.lines + line + 1),
                  static_cast<uintptr_t>(at.tile_lists + at.mask_lists.tiles));
        EXPECT_LE(reinterpret_cast<uintptr_t>(lists.tiles + end),
                  static_cast<uintptr_t>(at.tile_lists + at.mask_lists.bitmaps));
        EXPECT_LE(reinterpret_cast<uintptr_t>(lists.bitmaps + end * words),
                  static_cast<uintptr_t>(at.tile_lists + at.mask_lists.bytes));
      }
      EXPECT_EQ(static_cast<int64_t>(tiles.size()), MaskLineCount(at)) << broadcast;
    }
  }
}

TEST(ArenaLayout, KeepsRegionsApartAndAligned) {
  Problem p = Simple();
  ArenaLayout arena;
  CallLayout at = LayOutTensors(p, RegionUse::kInput, arena);
  LayOutGradients(at, {.tile_head_dim = 64, .rests = DqRests::kOfAllRows}, arena);
  LayOutTensors(p, RegionUse::kOutput, arena);
  int64_t end = 0;
  for (const Region& region : arena.regions()) {
    EXPECT_EQ(region.offset % kRegionAlignment, 0) << region.name;
    EXPECT_GE(region.offset, end) << region.name;
    end = region.offset + region.bytes;
  }
  EXPECT_LE(end, arena.bytes());
}

}  // namespace
}  // namespace attnd::cuda
