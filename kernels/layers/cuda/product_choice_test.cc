#include "kernels/layers/cuda/product_choice.h"

#include <string>

#include "gtest/gtest.h"

namespace attnd {
namespace {

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
    EXPECT_EQ(IsFasterInSmallTiles(p, c.multiprocessors), c.small) << c.name;
  }
}

}  // namespace
}  // namespace attnd
