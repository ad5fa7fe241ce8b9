#include "kernels/cpu/work_items.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "kernels/cpu/tiles.h"

namespace attnd {
namespace {

Problem Sized(int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t length) {
  Problem p;
  p.batch = batch;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = 64;
  return p;
}

using Key = std::tuple<int, int, int, int>;

TEST(WorkItems, CoverEachQueryTileOfEachCallOnceForAnyNumberOfThreads) {
  const Problem problems[] = {Sized(2, 6, 2, 300), Sized(1, 1, 1, 1)};
  CpuForwardCall calls[2];
  for (int n = 0; n < 2; ++n) calls[n].problem = &problems[n];
  for (int threads : {1, 2, 64}) {
    const WorkList list = ForwardItems(calls, threads);
    std::map<Key, int> seen;  // call, batch entry, KV head, tile of those that share it
    for (int64_t n = 0; n < list.size(); ++n) {
      const WorkItem& item = list[n];
      EXPECT_LE(item.count, MaxTilesPerItem(problems[item.call]));
      for (int t = 0; t < item.count; ++t) {
        ++seen[Key{item.call, item.batch_index, item.head, item.tile + t}];
      }
    }
    size_t expected = 0;
    for (int call = 0; call < 2; ++call) {
      const Problem& p = problems[call];
      const int tiles = static_cast<int>(p.group_size() * QueryTiles(p.q_len));
      for (int b = 0; b < p.batch; ++b) {
        for (int h = 0; h < p.kv_heads; ++h) {
          for (int t = 0; t < tiles; ++t, ++expected) {
            EXPECT_EQ(1, (seen[Key{call, b, h, t}])) << call << " " << b << " " << h << " " << t;
          }
        }
      }
    }
    EXPECT_EQ(seen.size(), expected) << "and nothing else";
  }
}

TEST(WorkItems, AreSmallerWhereThreadsAreMany) {
  const Problem p = Sized(1, 4, 4, 4096);
  CpuForwardCall call;
  call.problem = &p;
  EXPECT_EQ(ForwardItems({&call, 1}, 1).size(), 4 * QueryTiles(4096) / MaxTilesPerItem(p));
  EXPECT_GE(ForwardItems({&call, 1}, 8).size(), 4 * 8);
  EXPECT_EQ(ForwardItems({&call, 1}, 256).size(), 4 * QueryTiles(4096));
}

TEST(WorkItems, PutTheLongestHeadFirstAndItsLongestItemFirst) {
  Problem packed = Sized(2, 1, 1, 1300);
  packed.layout = Layout::kPackedThd;
  packed.cu_seqlens_q = packed.cu_seqlens_k = {0, 300, 1300};
  packed.causal = true;
  CpuForwardCall call;
  call.problem = &packed;
  const WorkList list = ForwardItems({&call, 1}, /*threads=*/16);
  EXPECT_EQ(list[0].batch_index, 1);
  EXPECT_EQ(list[0].tile, 1000 / kMaxQueryRows - 1) << "the last whole tile";
  for (int64_t n = 1; n < list.size(); ++n) {
    EXPECT_LE(list[n].batch_index, list[n - 1].batch_index) << "heads are interleaved";
  }
  EXPECT_EQ(list[list.size() - 1].batch_index, 0);
}

TEST(WorkItems, GiveEachGradientSlotOneItem) {
  Problem p = Sized(1, 8, 2, 1024);
  CpuBackwardCall call;
  call.problem = &p;
  const WorkList list = GradientItems({&call, 1});
  EXPECT_EQ(list.size(), 2 * GradientSlots(p, p.q_len));
  p.q_len = p.kv_len = 64;
  EXPECT_EQ(GradientItems({&call, 1}).size(), 2);
}

TEST(WorkItems, PutASlotBehindTheSlotsThatItWaitsFor) {
  Problem packed = Sized(3, 2, 1, 4000);
  packed.layout = Layout::kPackedThd;
  packed.cu_seqlens_q = packed.cu_seqlens_k = {0, 2500, 2600, 4000};
  const Problem dense = Sized(2, 4, 2, 1100);
  CpuBackwardCall calls[2];
  calls[0].problem = &packed, calls[1].problem = &dense;
  const WorkList list = GradientItems(calls);
  std::map<std::tuple<int, int, int>, int> slots;  // of a head, so far
  for (int64_t n = 0; n < list.size(); ++n) {
    const WorkItem& item = list[n];
    EXPECT_EQ(item.tile, (slots[{item.call, item.batch_index, item.head}]++));
  }
  EXPECT_EQ((slots[{0, 0, 0}]), 4);
  EXPECT_EQ((slots[{0, 1, 0}]), 1);
}

TEST(WorkItems, CoverTheBiasOnlyWhereItsGradientIsWanted) {
  Problem p = Sized(2, 2, 2, 100);
  p.bias = Bias{ElementType::kFloat32, {1, 2, 100, 1}, true};
  float gradient[200];
  CpuBackwardCall calls[2];
  for (CpuBackwardCall& call : calls) call.problem = &p;
  calls[1].d_bias = gradient;
  const WorkList list = BiasItems(calls);
  EXPECT_EQ(list.size(), 2 * 2);  // two heads, two tiles of rows
  for (int64_t n = 0; n < list.size(); ++n) EXPECT_EQ(list[n].call, 1);
}

}  // namespace
}  // namespace attnd
