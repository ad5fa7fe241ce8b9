#include "kernels/layers/cuda/product_choice.h"

#include <string>

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
const LayerKernel kOfGradients[] = {KernelIn(KernelKind::kProductDepthDepth, false, false),
                                    KernelIn(KernelKind::kProductDepthDepth, true, false),
                                    kWideGradient};

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

TEST(ProductChoice, TakesWideTilesWhereTheyFillMultiprocessors) {
  const ProductDesc many = {.rows = 16384, .columns = 3072, .depth = 768, .result = kProductStore};
  EXPECT_TRUE(FastestOf({kLarge, kSmall, kWide}, many, 132).wide);
  const ProductDesc few = {.rows = 512, .columns = 768, .depth = 768, .result = kProductStore};
  EXPECT_TRUE(FastestOf({kLarge, kSmall, kWide}, few, 132).small);
  // 128 large tiles take one turn of 132 multiprocessors, alone on each; 64 wide ones one as well.
  const ProductDesc one_turn = {
      .rows = 512, .columns = 4096, .depth = 1024, .result = kProductStore};
  EXPECT_TRUE(FastestOf({kLarge, kSmall, kWide}, one_turn, 132).wide);
  const ProductDesc few_rows = {
      .rows = 16, .columns = 4096, .depth = 1024, .result = kProductStore};
  EXPECT_FALSE(FastestOf({kLarge, kSmall, kWide}, few_rows, 132).wide);
}

TEST(ProductChoice, TakesSmallTilesOfGradientsOverFewRowsAlone) {
  const auto fastest = [](int32_t size, int32_t depth) {
    const ProductDesc p = {
        .rows = size, .columns = size, .depth = depth, .result = kProductAddBlocks};
    return FastestOf(kOfGradients, p, 132);
  };
  for (int32_t size : {768, 1024}) {
    EXPECT_TRUE(fastest(size, 512).small) << size;
    EXPECT_TRUE(fastest(size, 4096).wide) << size;
    EXPECT_TRUE(fastest(size, 16384).wide) << size;
  }
  EXPECT_TRUE(fastest(2048, 512).wide);
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
    const GradientItems items = ItemsOf(p, c.multiprocessors);
    EXPECT_EQ(items.cut.tile_columns, c.cut.tile_columns);
    EXPECT_EQ(items.cut.whole_tiles, c.cut.whole_tiles);
    EXPECT_EQ(items.cut.item_blocks, c.cut.item_blocks);
    EXPECT_EQ(items.count, c.count);
    EXPECT_NEAR(items.parts, c.time, 1e-9);
  }
}

TEST(ProductChoice, LaunchesOfGradientsHaveTurnsForAllTiles) {
  const ProductDesc gradient = {
      .rows = 1 << 20, .columns = 1280, .depth = 64, .result = kProductAddBlocks};
  // Ten tiles of 128 columns side by side.
  EXPECT_EQ(RowsOfLaunch(kWideGradient, gradient, 1 + 10 * 3 * kWideGradientTurns), 3 * 128);
  EXPECT_EQ(RowsOfLaunch(kWideGradient, gradient, 10 * 3 * kWideGradientTurns), 2 * 128);
  EXPECT_EQ(RowsOfLaunch(kOfGradients[0], gradient, 30), 3 * 128);
  const ProductDesc store = {
      .rows = 1 << 20, .columns = 1280, .depth = 64, .result = kProductStore};
  EXPECT_GT(RowsOfLaunch(kWide, store, 1), 1 << 20);
}

}  // namespace
}  // namespace attnd
