#include "kernels/engine/layout/dropout_parts.h"

#include "gtest/gtest.h"

namespace attnd::cuda {
namespace {

constexpr Tile kTile = {64, 128, 128, 1};
constexpr int64_t kRound = 64 * 128 / 8;

TEST(DropoutParts, HaveOneTileAfterTheOtherAsFarAsThereIsRoom) {
  const DropoutParts parts = CutForDropout({192, 128, 64, 0, 128}, kTile, 5 * kRound);
  EXPECT_EQ(parts.first_rounds, (std::vector<uint32_t>{0, 3, 0, 1, 1}));
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(parts.bytes, 5 * kRound);
}

TEST(DropoutParts, AreOneWhereAllFits) {
  const DropoutParts parts = CutForDropout({128, 64, 64}, kTile, 4 * kRound);
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{3}));
  EXPECT_EQ(parts.bytes, 4 * kRound);
}

TEST(DropoutParts, HaveRoomForATileThatIsLargerThanAll) {
  const DropoutParts parts = CutForDropout({64, 640, 64}, kTile, 2 * kRound);
  EXPECT_EQ(parts.first_rounds, (std::vector<uint32_t>{0, 0, 0}));
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(parts.bytes, 10 * kRound);
}

TEST(DropoutParts, TakeWhatIsToldAndNoMore) {
  for (const int64_t length : {1000, 65536, 1048576}) {
    for (const int64_t tiles : {1, 100, 3000}) {
      for (const int64_t group : {1, 8, 32}) {
        const int64_t visited = (length + 63) / 64 * 64 * group;
        const DropoutParts parts =
            CutForDropout(std::vector<int64_t>(static_cast<size_t>(tiles), visited), kTile);
        const int64_t told = DropoutBytes(tiles, length, group, kTile);
        EXPECT_LE(parts.bytes, told);
        EXPECT_GE(2 * parts.bytes, told);
        EXPECT_LE(told, std::max(kMaxDropoutBytes, visited / 64 * kRound));
      }
    }
  }
}

}  // namespace
}  // namespace attnd::cuda
