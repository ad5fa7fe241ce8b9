#include "kernels/layers/cuda/sum_group.h"

#include <vector>

#include "gtest/gtest.h"

namespace attnd {
namespace {

float* FloatsAt(uint64_t address) { return reinterpret_cast<float*>(address); }

// [2048, 64] numbers of float16 in two blocks of rows, added to sums of its own.
ColumnSumsDesc SumsAt(uint64_t place) {
  const uint64_t at = place << 22;
  return {.in = {FloatsAt(at), kBiasFloat16},
          .operand = kBiasFloat16,
          .columns = 64,
          .rows = 2048,
          .block_rows = 1024,
          .sums = FloatsAt(at + (1 << 20))};
}
constexpr int64_t kInBytes = int64_t{2048} * 64 * 2;

TEST(SumGroup, GivesEachItsTurnsCarriesAndBlocks) {
  SumGroup group;
  ColumnSumsDesc of_norm = SumsAt(2);
  of_norm.weight_sums = FloatsAt(uint64_t{3} << 22);
  group.Add(SumsAt(1), 5);
  group.Add(of_norm, 7);
  EXPECT_EQ(group.flops(), 12);
  std::vector<int32_t> turns(8);
  std::vector<float> carries(1024);
  const std::vector<ColumnSumsDesc> sums = group.Take(turns.data(), carries.data());
  ASSERT_EQ(sums.size(), 2u);
  EXPECT_EQ(sums[0].turns, turns.data());
  EXPECT_EQ(sums[1].turns, turns.data() + 2);  // of 32 columns each
  EXPECT_EQ(sums[0].carries, carries.data());
  EXPECT_EQ(sums[1].carries, carries.data() + 2 * 64);
  for (const ColumnSumsDesc& of : sums) EXPECT_EQ(of.blocks, 2 * 2);
  EXPECT_TRUE(group.empty());
  EXPECT_EQ(group.flops(), 0);
}

// Heads' norms have many vectors a row: a block of rows is several parts, which take turns.
TEST(SumGroup, GivesPartsOfABlockTurnsOfTheirOwn) {
  SumGroup group;
  ColumnSumsDesc heads = SumsAt(1);
  heads.rows = 3 * 8192 + 1;
  heads.block_rows = 8192;
  group.Add(heads, 1);
  group.Add(SumsAt(30), 1);
  std::vector<int32_t> turns(64);
  std::vector<float> carries(4096);
  const std::vector<ColumnSumsDesc> sums = group.Take(turns.data(), carries.data());
  EXPECT_EQ(sums[0].blocks, (3 * 4 + 1) * 2);
  EXPECT_EQ(sums[1].turns, turns.data() + 2 + 4 * 2);
  EXPECT_EQ(sums[1].carries, carries.data() + 4 * 64);
}

TEST(SumGroup, TakesWhatAddsToOtherNumbers) {
  SumGroup group;
  group.Add(SumsAt(1), 1);
  ColumnSumsDesc next = SumsAt(2);
  next.in = SumsAt(1).in;
  EXPECT_TRUE(group.Takes(next));
  next.sums = SumsAt(1).sums + 63;
  EXPECT_FALSE(group.Takes(next));
  next.sums = SumsAt(1).sums + 64;
  EXPECT_TRUE(group.Takes(next));
  next.weight_sums = SumsAt(1).sums;
  EXPECT_FALSE(group.Takes(next));
}

TEST(SumGroup, TakesWhatHasRoomForItsCarries) {
  SumGroup group;
  ColumnSumsDesc large = SumsAt(1);
  large.columns = static_cast<int32_t>(LaunchQueue::kStagingBytes / 4 / 2 - 64);
  large.in.data = FloatsAt(uint64_t{1} << 40);
  large.sums = FloatsAt(uint64_t{1} << 41);
  group.Add(large, 1);
  EXPECT_TRUE(group.Takes(SumsAt(2)));
  group.Add(SumsAt(2), 1);
  EXPECT_FALSE(group.Takes(SumsAt(3)));
}

TEST(SumGroup, HasSoManySumsAtMost) {
  SumGroup group;
  for (size_t n = 0; n < kMostLaunchedTogether; ++n) {
    ASSERT_TRUE(group.Takes(SumsAt(n + 1))) << n;
    group.Add(SumsAt(n + 1), 1);
  }
  EXPECT_FALSE(group.Takes(SumsAt(kMostLaunchedTogether + 1)));
}

TEST(SumGroup, KnowsWhatItTouches) {
  SumGroup group;
  ColumnSumsDesc sums = SumsAt(1);
  const DenseStatistics statistics[2048] = {};
  sums.statistics = statistics;
  group.Add(sums, 1);
  const auto touches = [&](const void* data, int64_t offset) {
    return group.Touches(ByteRange::At(static_cast<const char*>(data) + offset, 1));
  };
  EXPECT_TRUE(touches(sums.in.data, kInBytes - 1));
  EXPECT_FALSE(touches(sums.in.data, kInBytes));
  EXPECT_TRUE(touches(sums.sums, 0));
  EXPECT_FALSE(touches(sums.sums, 64 * 4));
  EXPECT_TRUE(touches(statistics, sizeof(statistics) - 1));
  EXPECT_FALSE(touches(statistics, sizeof(statistics)));
}

}  // namespace
}  // namespace attnd
