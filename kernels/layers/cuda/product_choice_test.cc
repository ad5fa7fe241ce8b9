#include "kernels/layers/cuda/product_choice.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace attnd {
namespace {

LayerKernel KernelIn(KernelKind kind, bool small, bool wide) {
  LayerKernel kernel = kind;
  kernel.small = small;
  kernel.wide = wide;
  return kernel;
}
const LayerKernel kLarge = KernelIn(KernelKind::kProductRowsRows, false, false),
                  kSmall = KernelIn(KernelKind::kProductRowsRows, true, false),
                  kWide = KernelIn(KernelKind::kProductRowsRows, false, true),
                  kWideGradient = KernelIn(KernelKind::kProductDepthDepth, false, true);
const LayerKernel kLargeGradient = KernelIn(KernelKind::kProductDepthDepth, false, false);

TEST(ProductChoice, TakesSmallTilesWhereLargeOnesLeaveMultiprocessorsIdle) {
  struct Case {
    std::string name;
    int32_t rows, columns, depth;
    int multiprocessors;
    bool small;
    int32_t result = kProductStore;
  };
  const Case cases[] = {{"24 large tiles", 512, 768, 768, 132, true},
                        {"128 large tiles of 132", 512, 4096, 1024, 132, false},
                        {"96 large tiles, three small ones each", 512, 3072, 768, 132, true},
                        {"many rows", 16384, 768, 768, 132, false},
                        {"192 large tiles, six small ones each", 4096, 768, 768, 132, true},
                        {"256 large tiles", 4096, 1024, 768, 132, false},
                        {"one multiprocessor", 512, 768, 768, 1, false},
                        {"one row, most of a large tile nothing", 1, 768, 768, 1, true},
                        {"gradient of few rows", 768, 768, 512, 132, true, kProductAddBlocks},
                        {"gradient whose blocks of rows fill the GPU", 768, 768, 16384, 132, false,
                         kProductAddBlocks}};
  for (const Case& c : cases) {
    const ProductDesc p = {
        .rows = c.rows, .columns = c.columns, .depth = c.depth, .result = c.result};
    EXPECT_EQ(FastestOf({kLarge, kSmall}, p, c.multiprocessors).small, c.small) << c.name;
  }
}

TEST(ProductChoice, TakesWideTilesWhereThereAreSome) {
  for (int32_t rows : {1, 512, 16384}) {
    const ProductDesc p = {.rows = rows, .columns = 3072, .depth = 768, .result = kProductStore};
    EXPECT_TRUE(FastestOf({kLarge, kSmall, kWide}, p, 132).wide) << rows;
  }
}

TEST(ProductChoice, CutsWideGradientsWhereTilesLeaveMostMultiprocessorsIdle) {
  struct Case {
    int32_t rows, columns, parts;  // of C, in units of 128; of the depth, the last one not whole
    GradientCut cut;
    int64_t count;
    double time;
    int multiprocessors = 132;
  };
  const Case cases[] = {
      // 24, 36, 64, 96, 108, 132 and 144 tiles of 128 columns.
      {4, 6, 16, {128, 0, 1}, 24 * 16, 8.8},
      {6, 6, 16, {128, 0, 1}, 36 * 16, 10.5},
      {6, 6, 4, {192, 0, 1}, 24 * 4, 2.86},
      {6, 6, 1, {128, 36, 1}, 36, 1},
      {8, 8, 16, {128, 0, 1}, 64 * 16, 16},
      {24, 4, 16, {128, 96, 1}, 96, 16},
      {12, 9, 16, {128, 108, 1}, 108, 16},
      {12, 11, 16, {128, 132, 4}, 132, 16},
      {24, 6, 16, {192, 96, 1}, 96, 20.8},
      {24, 6, 1, {128, 144, 1}, 144, 2},
      {24, 8, 16, {128, 132, 4}, 132 + 60 * 4, 32},
      // 176 tiles of 192 columns, or 256.
      {16, 16, 16, {128, 256, 4}, 256, 32},
      {16, 16, 3, {128, 256, 3}, 256, 6},
      // 704 and 768 of 192 columns.
      {32, 32, 16, {192, 660, 4}, 660 + 44 * 4, 120.38},
      {32, 32, 5, {192, 660, 4}, 660 + 44 * 2, 1.3 * (25 + 4.2)},
      {32, 36, 16, {192, 768, 4}, 768, 1.3 * 6 * 16},
      // One multiprocessor more or less than twice as many as are left.
      {3, 1, 4, {128, 3, 1}, 3, 4, 6},
      {3, 1, 4, {128, 0, 1}, 12, 4, 7},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.rows << " x " << c.columns << " x " << c.parts);
    const ProductDesc p = {.rows = 128 * c.rows,
                           .columns = 128 * c.columns,
                           .depth = kProductBlockDepth * c.parts - 8,
                           .result = kProductAddBlocks};
    const GradientItems items = ItemsOf({&p, 1}, c.multiprocessors);
    ASSERT_EQ(items.products.size(), 1u);
    const auto& [cut, count] = items.products[0];
    EXPECT_EQ(cut.tile_columns, c.cut.tile_columns);
    EXPECT_EQ(cut.whole_tiles, c.cut.whole_tiles);
    EXPECT_EQ(cut.item_blocks, c.cut.item_blocks);
    EXPECT_EQ(count, c.count);
    EXPECT_NEAR(items.parts, c.time, 1e-9);
  }
}

TEST(ProductChoice, CutsTheLastTilesOfGradientsThatAreLaunchedTogether) {
  const auto gradient = [](int32_t rows, int32_t columns) {
    return ProductDesc{.rows = 128 * rows,
                       .columns = 128 * columns,
                       .depth = 16 * kProductBlockDepth,
                       .result = kProductAddBlocks};
  };
  // 36, 240 and 12 tiles of 128 columns: 264 whole ones, and 24 that are cut.
  const std::vector<ProductDesc> products = {gradient(6, 6), gradient(12, 20), gradient(2, 6)};
  const GradientItems items = ItemsOf(products, 132);
  ASSERT_EQ(items.products.size(), 3u);
  const int32_t whole[] = {36, 228, 0};
  const int64_t counts[] = {36, 228 + 12 * 4, 12 * 4};
  for (int n = 0; n < 3; ++n) {
    EXPECT_EQ(items.products[n].cut.tile_columns, 128) << n;
    EXPECT_EQ(items.products[n].cut.whole_tiles, whole[n]) << n;
    EXPECT_EQ(items.products[n].cut.item_blocks, 4) << n;
    EXPECT_EQ(items.products[n].count, counts[n]) << n;
  }
  EXPECT_NEAR(items.parts, 2 * 16 + 8.8, 1e-9);
  // All take the width that is asked for.
  const GradientItems wide = ItemsOf(products, 132, kWideGradientColumns);
  EXPECT_EQ(wide.products[0].cut.tile_columns, kWideGradientColumns);
  EXPECT_GT(wide.parts, items.parts);
}

TEST(ProductChoice, LaunchesOfGradientsHaveTurnsForAllTiles) {
  const ProductDesc gradient = {
      .rows = 1 << 20, .columns = 1280, .depth = 64, .result = kProductAddBlocks};
  // Ten tiles of 128 columns side by side.
  EXPECT_EQ(RowsOfLaunch(kWideGradient, gradient, 1 + 10 * 3 * kWideGradientTurns), 3 * 128);
  EXPECT_EQ(RowsOfLaunch(kWideGradient, gradient, 10 * 3 * kWideGradientTurns), 2 * 128);
  EXPECT_EQ(RowsOfLaunch(kLargeGradient, gradient, 30), 3 * 128);
  const ProductDesc store = {
      .rows = 1 << 20, .columns = 1280, .depth = 64, .result = kProductStore};
  EXPECT_GT(RowsOfLaunch(kWide, store, 1), 1 << 20);
}

}  // namespace
}  // namespace attnd
