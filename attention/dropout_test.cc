#include "attention/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <set>

namespace attnd {
namespace {

std::array<uint32_t, 4> Words(const PhiloxBlock& block) {
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

// Random123's published answers for seven rounds (kat_vectors, "philox4x32 7").
TEST(Philox, GivesThePublishedAnswers) {
  using Answer = std::array<uint32_t, 4>;
  EXPECT_EQ(Words(Philox4x32x7({{0, 0, 0, 0}}, 0, 0)),
            (Answer{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  uint32_t ones = 0xffffffff;
  EXPECT_EQ(Words(Philox4x32x7({{ones, ones, ones, ones}}, ones, ones)),
            (Answer{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(Words(Philox4x32x7({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822,
                               0x299f31d0)),
            (Answer{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

// The table of docs/NUMERICS.md.
TEST(DropoutByte, GivesTheAnswersOfTheDocumentation) {
  struct Known {
    uint64_t seed, offset;
    uint32_t head_index, row, column, byte;
  };
  for (const Known& known :
       {Known{0, 0, 0, 0, 0, 9},
        {0, 0, 0, 9, 27, 136},
        {42, 0, 0, 0, 1, 193},
        {42, 0, 5, 100, 1000, 20},
        {42, 7, 5, 100, 1000, 134},
        {0x123456789abcdef0u, 0xfedcba9876543210u, 131071, 1048575, 1048575, 185},
        {0x8000000000000000u, 0x100000000u, 1, 17, 33, 221}}) {
    DropoutStream stream = MakeDropoutStream(known.seed, known.offset, known.head_index);
    EXPECT_EQ(DropoutByte(stream, known.row, known.column), known.byte)
        << "seed " << known.seed << " row " << known.row << " column " << known.column;
  }
}

TEST(DropoutByte, FollowsTheWrittenRuleOfLaneAndByte) {
  DropoutStream stream = MakeDropoutStream(77, 5, 3);
  for (uint32_t i = 0; i < 40; ++i) {
    for (uint32_t j = 0; j < 70; ++j) {
      uint32_t lane = (i & 7) * 4 + ((j & 7) >> 1);
      PhiloxBlock block = Philox4x32x7({{5, (i >> 4) * 32 + lane, 3, j >> 5}}, 77, 0);
      uint8_t bytes[16];
      std::memcpy(bytes, block.word, 16);
      uint32_t index = ((i >> 3) & 1) * 8 + ((j >> 3) & 3) * 2 + (j & 1);
      ASSERT_EQ(DropoutByte(stream, i, j), bytes[index]) << i << " " << j;
    }
  }
}

TEST(DropoutByte, UsesEachByteOfABlockOnce) {
  DropoutStream stream = MakeDropoutStream(1, 2, 3);
  std::set<std::array<uint32_t, 3>> places;  // row block, lane, byte
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t j = 0; j < 32; ++j) {
      uint32_t lane = (i & 7) * 4 + ((j & 7) >> 1);
      uint32_t index = ((i >> 3) & 1) * 8 + ((j >> 3) & 3) * 2 + (j & 1);
      places.insert({0, lane, index});
      PhiloxBlock block = DropoutBytes(stream, 0, 0, lane);
      uint8_t bytes[16];
      std::memcpy(bytes, block.word, 16);
      ASSERT_EQ(DropoutByte(stream, i, j), bytes[index]);
    }
  }
  EXPECT_EQ(places.size(), 16 * 32);
}

TEST(DropoutByte, DependsOnAllBitsOfSeedAndOffset) {
  auto bytes = [](uint64_t seed, uint64_t offset) {
    DropoutStream stream = MakeDropoutStream(seed, offset, 0);
    std::array<uint32_t, 64> drawn;
    for (uint32_t j = 0; j < 64; ++j) drawn[j] = DropoutByte(stream, 0, j);
    return drawn;
  };
  std::set<std::array<uint32_t, 64>> distinct = {bytes(0, 0)};
  for (int bit = 0; bit < 64; ++bit) {
    distinct.insert(bytes(uint64_t{1} << bit, 0));
    if (bit < 32) distinct.insert(bytes(0, uint64_t{1} << bit));
  }
  EXPECT_EQ(distinct.size(), 1 + 64 + 32);
  EXPECT_NE(bytes(0, uint64_t{1} << 40), bytes(0, 0));
}

TEST(DropoutByte, DropsTheStatedFractionWithinFiveSigma) {
  constexpr uint32_t kRows = 512, kColumns = 512;
  for (uint32_t threshold : {1u, 26u, 128u, 255u}) {
    DropoutStream stream = MakeDropoutStream(1234, 0, 7);
    double dropped = 0;
    for (uint32_t i = 0; i < kRows; ++i) {
      for (uint32_t j = 0; j < kColumns; ++j) dropped += DropoutByte(stream, i, j) < threshold;
    }
    double count = double{kRows} * kColumns, p = threshold / 256.0;
    EXPECT_NEAR(dropped, count * p, 5 * std::sqrt(count * p * (1 - p))) << threshold;
  }
}

TEST(DropoutThreshold, RoundsToTheNearestOf256) {
  EXPECT_EQ(DropoutThreshold(0), 0);
  EXPECT_EQ(DropoutThreshold(0.1f), 26);
  EXPECT_EQ(DropoutThreshold(0.5f), 128);
  EXPECT_EQ(DropoutThreshold(0.998f), 255);
  EXPECT_EQ(DropoutScale(128), 2.0f);
}

}  // namespace
}  // namespace attnd
