#include "attention/patterns/block_pattern.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>

#include "attention/patterns/attention_map.h"

namespace attnd {
namespace {

using Blocks = std::set<std::pair<int64_t, int64_t>>;

Blocks Kept(const BlockList& list) {
  Blocks kept;
  for (size_t row = 0; row + 1 < list.indptr.size(); ++row) {
    for (uint32_t n = list.indptr[row]; n < list.indptr[row + 1]; ++n) {
      kept.insert({row, list.indices[n]});
    }
  }
  return kept;
}

Blocks Build(const std::vector<float>& pooled, const PatternOptions& options) {
  const int64_t blocks = std::lround(std::sqrt(pooled.size()));
  const auto list = BuildBlockPattern(pooled, blocks, 32, options);
  EXPECT_TRUE(list.ok()) << list.status();
  return list.ok() ? Kept(*list) : Blocks{};
}

// SPION's walk as its paper draws it, by recursion over a map padded with zeros.
class Walker {
 public:
  Walker(std::vector<float> pooled, int64_t blocks, float threshold)
      : pooled_(std::move(pooled)), blocks_(blocks), threshold_(threshold) {}

  Blocks Run() {
    for (int64_t n = 0; n < blocks_; ++n) {
      From(n, 0);
      From(0, n);
    }
    return kept_;
  }

 private:
  float Value(int64_t i, int64_t j) const {
    return i == blocks_ || j == blocks_ ? 0 : pooled_[i * blocks_ + j];
  }
  void From(int64_t i, int64_t j) {
    if (i == blocks_ || j == blocks_) return;
    int64_t next_i = i + 1, next_j = j + 1;
    if (Value(i + 1, j) > Value(i, j + 1)) {
      if (Value(i + 1, j) > Value(i + 1, j + 1)) next_j = j;
    } else if (Value(i, j + 1) > Value(i + 1, j + 1)) {
      next_i = i;
    }
    if (Value(next_i, next_j) > threshold_) kept_.insert({next_i, next_j});
    From(next_i, next_j);
  }

  const std::vector<float> pooled_;
  const int64_t blocks_;
  const float threshold_;
  Blocks kept_;
};

TEST(BlockPattern, FloodWalksAsSpionDoes) {
  std::mt19937_64 random(7);
  for (int map = 0; map < 60; ++map) {
    const int64_t blocks = 1 + map % 33;
    std::vector<float> pooled(static_cast<size_t>(blocks * blocks));
    // Every third map has few different values, so that neighbours tie.
    for (float& value : pooled) {
      value = map % 3 == 0 ? static_cast<float>(random() % 4) / 8
                           : static_cast<float>(random() % 100000) / 1e5f;
    }
    const double quantile = (map % 10) / 9.0;
    EXPECT_EQ(Build(pooled, {.rule = PatternRule::kFlood, .quantile = quantile}),
              Walker(pooled, blocks, Quantile(pooled, quantile)).Run());
  }
}

TEST(BlockPattern, FloodKeepsNothingOfMapsWithoutDifferences) {
  for (const float value : {0.0f, 0.25f}) {
    const std::vector<float> pooled(64, value);
    EXPECT_EQ(Build(pooled, {.rule = PatternRule::kFlood, .quantile = 0.9}), Blocks{});
    const Blocks diagonal =
        Build(pooled, {.rule = PatternRule::kFlood, .quantile = 0.9, .force_diagonal = true});
    EXPECT_EQ(diagonal.size(), 8u);
    EXPECT_EQ(diagonal.count({3, 3}), 1u);
  }
}

// A map that is a band, and one with a stripe far from the diagonal: both are found.
TEST(BlockPattern, FindsPlantedBandAndStripe) {
  constexpr int64_t kRows = 512, kBlock = 32;
  for (const int64_t shift : {int64_t{0}, int64_t{-128}}) {
    std::vector<float> map(kRows * kRows, 1e-4f);
    for (int64_t i = 0; i < kRows; ++i) {
      if (i + shift >= 0) map[i * kRows + i + shift] = 0.5f;
    }
    const std::vector<float> pooled = PoolDiagonals({kRows, kRows, kBlock}, map);
    const Blocks kept =
        Build(pooled, {.rule = PatternRule::kFlood, .quantile = 0.9, .force_diagonal = true});
    for (int64_t n = -shift / kBlock + 1; n < kRows / kBlock; ++n) {
      EXPECT_EQ(kept.count({n, n + shift / kBlock}), 1u) << n;
    }
  }
}

TEST(BlockPattern, TopKTakesTheLargestInOrder) {
  const std::vector<float> pooled = {1, 5, 2, 2, 0, 2, 3, 1, 2};
  const PatternOptions four = {.rule = PatternRule::kTopK, .density = 4.9 / 9};
  EXPECT_EQ(Build(pooled, four), (Blocks{{0, 1}, {0, 2}, {1, 0}, {2, 0}}));
  // SPION-C: 8 − 3 of them and the diagonal.
  const PatternOptions spion = {
      .rule = PatternRule::kTopK, .density = 8.0 / 9, .force_diagonal = true};
  EXPECT_EQ(Build(pooled, spion),
            (Blocks{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}, {2, 0}, {2, 2}}));
}

TEST(BlockPattern, FillsRowsThatKeepLittle) {
  const std::vector<float> pooled = {9, 8, 7, 0, 1, 2, 0, 0, 0};
  const PatternOptions options = {
      .rule = PatternRule::kTopK, .density = 3.0 / 9, .min_blocks_per_row = 1};
  EXPECT_EQ(Build(pooled, options), (Blocks{{0, 0}, {0, 1}, {0, 2}, {1, 2}, {2, 0}}));
}

// Values of torch.quantile (PyTorch 2.11) in float32.
TEST(BlockPattern, QuantileIsTorchs) {
  const std::vector<float> values = {0.1f, 0.7f, 0.3f, 0.9f, 0.2f};
  EXPECT_EQ(Quantile(values, 0), 0.1f);
  EXPECT_EQ(Quantile(values, 1), 0.9f);
  EXPECT_EQ(Quantile(values, 0.5), 0.3f);
  EXPECT_EQ(Quantile(values, 0.96), 0.86799997091293334961f);
  EXPECT_EQ(Quantile(values, 0.3), 0.22000001370906829834f);
}

TEST(BlockPattern, RefusesWhatMeansNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> map(16, 0.5f);
  const struct {
    std::vector<float> pooled;
    int64_t blocks, block;
    PatternOptions options;
    std::string field;
  } cases[] = {
      {map, 3, 32, {}, "pooled: expected 3 × 3 averages, got 16"},
      {map, 4, 0, {}, "block: expected 1..1048576, got 0"},
      {map, 0, 32, {}, "blocks: expected 1..4096, got 0"},
      {map, 4, 32, {.quantile = 1.5}, "quantile: expected 0..1, got 1.5"},
      {map, 4, 32, {.quantile = nan}, "quantile: expected 0..1, got nan"},
      {map, 4, 32, {.rule = PatternRule::kTopK}, "density: expected above 0, at most 1, got 0"},
      {map, 4, 32, {.rule = PatternRule::kTopK, .density = 1.1}, "density: expected above 0"},
      {map, 4, 32, {.rule = PatternRule::kTopK, .density = 0.06}, "density: expected at least one"},
      {map,
       4,
       32,
       {.rule = PatternRule::kTopK, .density = 0.25, .force_diagonal = true},
       "density: expected at least one"},
      {map, 4, 32, {.min_blocks_per_row = 5}, "min_blocks_per_row: expected 0..4, got 5"},
      {{0, 1, nan, 1}, 2, 32, {}, "pooled: expected finite averages, got nan in block (1, 0)"},
      {{0, 1, 1, infinity}, 2, 32, {}, "pooled: expected finite averages, got inf in block (1, 1)"},
  };
  for (const auto& c : cases) {
    const auto list = BuildBlockPattern(c.pooled, c.blocks, c.block, c.options);
    EXPECT_EQ(list.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(list.status().message().substr(0, c.field.size()), c.field);
  }
}

}  // namespace
}  // namespace attnd
