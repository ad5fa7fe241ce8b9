// Which thread of a launch has which numbers.
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/dense/numbers.h"

namespace attnd {
namespace {

TEST(Neighbours, ComeToOneThreadWhateverItHas) {
  struct Shape {
    int64_t rows, columns;
  };
  for (const Shape& shape : {Shape{1, 5}, {1, 8 * 256 * 5 + 3}, {37, 100}, {300, 64}}) {
    const int64_t of_row = NumbersGroupsOfRow(shape.columns);
    for (int passes : {1, 4}) {
      SCOPED_TRACE(absl::StrCat(shape.rows, "x", shape.columns, " in ", passes));
      std::vector<int> visits(shape.rows * of_row);
      int64_t numbers = 0;
      const int64_t blocks = DivideUp(shape.rows * of_row, int64_t{kNumbersThreads} * passes);
      for (int block = 0; block < blocks; ++block) {
        for (int thread = 0; thread < kNumbersThreads; ++thread) {
          ForNeighbours(shape.rows, shape.columns, passes, {thread, block}, [&](const auto& place) {
            ++visits[place.row * of_row + place.column / kNeighbours];
            numbers += place.count;
          });
        }
      }
      EXPECT_THAT(visits, testing::Each(1));
      EXPECT_EQ(numbers, shape.rows * shape.columns);
    }
  }
}

TEST(Neighbours, AreSeveralOfAThreadWhereThereAreMany) {
  EXPECT_EQ(NumbersPasses(512, 768), 1);
  EXPECT_EQ(NumbersBlocks(512, 768), 512 * 96 / 256);
  EXPECT_EQ(NumbersPasses(1, 16384 * 768), 4);
  EXPECT_EQ(NumbersBlocks(1, 16384 * 768), 16384 * 96 / 1024);
  EXPECT_EQ(NumbersBlocks(1, 16384 * 768 + 1), 16384 * 96 / 1024 + 1);
}

}  // namespace
}  // namespace attnd
