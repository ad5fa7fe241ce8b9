#include "kernels/cuda/layout/dropout_parts.h"

#include "gtest/gtest.h"

namespace attnd::cuda {
namespace {

constexpr Tile kTile = {64, 128, 128, 1};
constexpr int64_t kRoundBytes = 64 * 128 / 8;
constexpr DropoutRound kRound = {64, kRoundBytes};

TEST(DropoutParts, HaveRoundsOfTheOtherSide) {
  EXPECT_EQ(BackwardRound(kTile).visited, 64);
  EXPECT_EQ(ForwardRound({192, 128, 64, 1}).visited, 128);
  EXPECT_EQ(BackwardRound(kTile).bytes, kRoundBytes);
  EXPECT_EQ(ForwardRound({192, 128, 64, 1}).bytes, 3 * kRoundBytes);
}

TEST(DropoutParts, HaveOneTileAfterTheOtherAsFarAsThereIsRoom) {
  const DropoutParts parts = CutForDropout({192, 128, 64, 0, 128}, kRound, 5 * kRoundBytes);
  EXPECT_EQ(parts.first_rounds, (std::vector<uint32_t>{0, 3, 0, 1, 1}));
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(parts.bytes, 5 * kRoundBytes);
}

TEST(DropoutParts, AreOneWhereAllFits) {
  const DropoutParts parts = CutForDropout({128, 64, 64}, kRound, 4 * kRoundBytes, 2);
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{3}));
  EXPECT_EQ(parts.bytes, 4 * kRoundBytes);
}

TEST(DropoutParts, HaveRoomForATileThatIsLargerThanAll) {
  const DropoutParts parts = CutForDropout({64, 640, 64}, kRound, 2 * kRoundBytes);
  EXPECT_EQ(parts.first_rounds, (std::vector<uint32_t>{0, 0, 0}));
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(parts.bytes, 10 * kRoundBytes);
}

TEST(DropoutParts, EndWhereAllBlocksDo) {
  const DropoutParts parts = CutForDropout(std::vector<int64_t>(9, 64), kRound, 5 * kRoundBytes, 2);
  EXPECT_EQ(parts.ends, (std::vector<int64_t>{4, 9}));
  EXPECT_EQ(parts.first_rounds, (std::vector<uint32_t>{0, 1, 2, 3, 0, 1, 2, 3, 4}));
  EXPECT_EQ(parts.bytes, 5 * kRoundBytes);
}

TEST(DropoutParts, TakeWhatIsToldAndNoMore) {
  for (const int64_t length : {1000, 65536, 1048576}) {
    for (const int64_t tiles : {1, 100, 3000}) {
      for (const int64_t heads : {1, 8, 32}) {
        const int64_t visited = (length + 63) / 64 * 64 * heads;
        const DropoutParts parts =
            CutForDropout(std::vector<int64_t>(static_cast<size_t>(tiles), visited), kRound);
        const int64_t told = DropoutBytes(tiles, length, heads, kRound);
        EXPECT_LE(parts.bytes, told);
        EXPECT_GE(2 * parts.bytes, told);
        EXPECT_LE(told, std::max(kMaxDropoutBytes, visited / 64 * kRoundBytes));
      }
    }
  }
}

}  // namespace
}  // namespace attnd::cuda
