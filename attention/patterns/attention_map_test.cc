#include "attention/patterns/attention_map.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace attnd {
namespace {

std::vector<float> RandomMap(int64_t entries, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> map(static_cast<size_t>(entries));
  for (float& value : map) value = static_cast<float>(random() >> 40) / (1 << 24);
  return map;
}

// The convolution as written, then the averages.
std::vector<float> ConvolveAndPool(const MapShape& s, const std::vector<float>& map, int diagonal) {
  std::vector<float> pooled;
  for (int64_t row = 0; row < s.row_blocks(); ++row) {
    for (int64_t column = 0; column < s.key_blocks(); ++column) {
      double sum = 0;
      int64_t entries = 0;
      for (int64_t i = row * s.block; i < std::min(s.rows, (row + 1) * s.block); ++i) {
        for (int64_t j = column * s.block; j < std::min(s.keys, (column + 1) * s.block); ++j) {
          ++entries;
          for (int t = -(diagonal / 2); t <= diagonal / 2; ++t) {
            const bool inside = i + t >= 0 && i + t < s.rows && j + t >= 0 && j + t < s.keys;
            if (inside) sum += map[(i + t) * s.keys + j + t];
          }
        }
      }
      pooled.push_back(static_cast<float>(sum / static_cast<double>(entries)));
    }
  }
  return pooled;
}

TEST(AttentionMap, PoolsAsTheDefinitionSays) {
  const struct {
    MapShape shape;
    int diagonal;
  } cases[] = {{{64, 64, 16}, 31}, {{64, 64, 16}, 1}, {{70, 70, 32}, 31}, {{33, 65, 8}, 5},
               {{8, 8, 64}, 31},   {{1, 1, 1}, 1},    {{16, 16, 1}, 3}};
  for (const auto& c : cases) {
    const auto map = RandomMap(c.shape.rows * c.shape.keys, 1 + c.diagonal);
    const auto expected = ConvolveAndPool(c.shape, map, c.diagonal);
    const auto got = PoolDiagonals(c.shape, map, c.diagonal);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t n = 0; n < got.size(); ++n) EXPECT_NEAR(got[n], expected[n], 1e-6 * expected[n]);
  }
}

TEST(AttentionMap, PoolsBlocksAlone) {
  const MapShape shape = {33, 65, 8};
  const auto map = RandomMap(shape.rows * shape.keys, 2);
  EXPECT_EQ(PoolBlocks(shape, map), ConvolveAndPool(shape, map, 1));
}

TEST(AttentionMap, RaggedBlocksAverageTheEntriesThatExist) {
  const std::vector<float> ones(7 * 5, 1.0f);
  EXPECT_EQ(PoolBlocks({7, 5, 4}, ones), std::vector<float>(4, 1.0f));
}

TEST(AttentionMap, Distance) {
  EXPECT_EQ(FrobeniusDistance({{3, 0, 1}}, {{0, 4, 1}}), 5);
  const auto map = RandomMap(100, 3);
  EXPECT_EQ(FrobeniusDistance(map, map), 0);
}

// A map of two values has skewness (1 − 2q) / √(q(1 − q)), q the part of the larger one.
TEST(AttentionMap, SkewnessOfTwoValues) {
  for (const int large : {1, 10, 250, 500, 900}) {
    constexpr int kEntries = 1000;
    PowerSums sums(1.0 / 64), half(1.0 / 64);
    for (int n = 0; n < kEntries; ++n) (n % 2 == 0 ? sums : half).Add(n < large ? 0.5f : 0.001f);
    sums.Add(half);
    const double q = large / double{kEntries};
    EXPECT_NEAR(sums.Skewness(), (1 - 2 * q) / std::sqrt(q * (1 - q)), 1e-6);
    EXPECT_NEAR(sums.Mean(), q * 0.5 + (1 - q) * 0.001, 1e-9);
    EXPECT_NEAR(sums.Variance(), q * (1 - q) * 0.499 * 0.499, 1e-8);
  }
}

TEST(AttentionMap, EqualEntriesHaveNoSkewness) {
  for (const float value : {0.0f, 1.0f / 3, 1.0f / 1024}) {
    PowerSums sums(value);
    for (int n = 0; n < 100000; ++n) sums.Add(value * (1 + (n % 2) * 0x1p-24f));
    EXPECT_TRUE(std::isnan(sums.Skewness())) << value;
  }
}

}  // namespace
}  // namespace attnd
