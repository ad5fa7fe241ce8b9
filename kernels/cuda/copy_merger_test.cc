#include "kernels/cuda/copy_merger.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace attnd::cuda {
namespace {

struct Piece {
  int64_t device, host, bytes;
  int allocation = 0;
};

class CopyMergerTest : public testing::Test {
 protected:
  std::vector<HostCopy> Merge(const std::vector<Piece>& pieces) {
    std::vector<HostCopy> copies;
    CopyMerger merger;
    for (const Piece& piece : pieces) {
      auto done = merger.Add(Device(piece.device), host_.data() + piece.host, piece.bytes,
                             piece.allocation);
      if (done.has_value()) copies.push_back(*done);
    }
    for (auto left = merger.Next(); left.has_value(); left = merger.Next()) {
      copies.push_back(*left);
    }
    return copies;
  }
  uint64_t Device(int64_t offset) const {
    return reinterpret_cast<uint64_t>(device_.data()) + static_cast<uint64_t>(offset);
  }

  std::vector<std::byte> host_ = std::vector<std::byte>(4096);
  std::vector<std::byte> device_ = std::vector<std::byte>(4096);
};

TEST_F(CopyMergerTest, GivesNothingForNothing) { EXPECT_TRUE(Merge({}).empty()); }

TEST_F(CopyMergerTest, JoinsNeighbours) {
  const auto copies = Merge({{0, 64, 32}, {32, 96, 8}, {40, 104, 24}});
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].bytes, 64);
  EXPECT_EQ(copies[0].rows, 1);
  EXPECT_EQ(copies[0].host, host_.data() + 64);
}

TEST_F(CopyMergerTest, MakesRowsOfBlocksAtOneDistance) {
  const auto copies = Merge({{0, 0, 32}, {32, 32, 32}, {100, 200, 64}, {200, 400, 64}});
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].bytes, 64);
  EXPECT_EQ(copies[0].rows, 3);
  EXPECT_EQ(copies[0].device_pitch, 100);
  EXPECT_EQ(copies[0].host_pitch, 200);
}

TEST_F(CopyMergerTest, MakesRowsOfBlocksOfSeveralSizesThatTakeTurns) {
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < 5; ++n) {
    pieces.push_back({n * 200, n * 300, 40});
    pieces.push_back({n * 200 + 64, n * 300 + 48, 100});
  }
  const auto copies = Merge(pieces);
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(copies[0].rows, 5);
  EXPECT_EQ(copies[1].rows, 5);
}

TEST_F(CopyMergerTest, JoinsNothingOfDifferentAllocations) {
  EXPECT_EQ(Merge({{0, 0, 64, 0}, {64, 64, 64, 1}}).size(), 2u);
  EXPECT_EQ(Merge({{0, 0, 64, 1}, {100, 200, 64, 2}}).size(), 2u);
  EXPECT_EQ(Merge({{0, 0, 64, 1}, {100, 200, 64, 0}, {200, 400, 64, 1}}).size(), 2u);
}

TEST_F(CopyMergerTest, KeepsFewCopiesOpen) {
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < 30; ++n) pieces.push_back({n * 100, n * 100, n + 1});
  EXPECT_EQ(Merge(pieces).size(), 30u);
}

TEST_F(CopyMergerTest, BeginsAnewWhereSizeOrDistanceChange) {
  EXPECT_EQ(Merge({{0, 0, 64}, {100, 200, 64}, {200, 401, 64}}).size(), 2u);
  EXPECT_EQ(Merge({{0, 0, 64}, {100, 200, 64}, {201, 400, 64}}).size(), 2u);
  EXPECT_EQ(Merge({{0, 0, 64}, {100, 200, 32}}).size(), 2u);
  EXPECT_EQ(Merge({{0, 400, 64}, {100, 200, 64}}).size(), 2u);  // backwards
  EXPECT_EQ(Merge({{0, 0, 64}, {32, 200, 64}}).size(), 2u);     // rows that overlap
}

// Whatever becomes of pieces, each byte arrives once.
TEST_F(CopyMergerTest, CopiesWhatItWasGivenWhenPiecesAreRandom) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    for (std::byte& byte : host_) byte = static_cast<std::byte>(random());
    std::memset(device_.data(), 0, device_.size());
    std::vector<std::byte> expected = device_;
    std::vector<Piece> pieces;
    const int64_t gaps = static_cast<int64_t>(random() % 3) * 16;
    Piece next = {0, 0, 16};
    while (next.device + 256 < 4096 && next.host + 256 < 4096) {
      next.bytes = 16 << (random() % 4 == 0 ? random() % 3 : 0);
      pieces.push_back(next);
      std::memcpy(expected.data() + next.device, host_.data() + next.host,
                  static_cast<size_t>(next.bytes));
      next.device += next.bytes + (random() % 4 == 0 ? 48 : gaps);
      next.host += next.bytes + (random() % 4 == 0 ? 32 : gaps);
    }
    int64_t copied = 0;
    for (const HostCopy& copy : Merge(pieces)) {
      for (int64_t row = 0; row < copy.rows; ++row) {
        std::memcpy(reinterpret_cast<std::byte*>(copy.device) + row * copy.device_pitch,
                    copy.host + row * copy.host_pitch, static_cast<size_t>(copy.bytes));
        copied += copy.bytes;
      }
    }
    int64_t given = 0;
    for (const Piece& piece : pieces) given += piece.bytes;
    EXPECT_EQ(copied, given);
    ASSERT_EQ(device_, expected);
  }
}

}  // namespace
}  // namespace attnd::cuda
