#include "kernels/layers/cuda/product_choice.h"

#include <string>

#include "gtest/gtest.h"

namespace attnd {
namespace {

LayerKernel KernelIn(bool small, bool wide) {
  LayerKernel kernel = KernelKind::kProductRowsRows;
  kernel.small = small;
  kernel.wide = wide;
  return kernel;
}
const LayerKernel kLarge = KernelIn(false, false), kSmall = KernelIn(true, false),
                  kWide = KernelIn(false, true);

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

}  // namespace
}  // namespace attnd
