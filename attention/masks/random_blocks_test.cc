// Known answers of the draw, from a generator written apart that gives Random123's published words
// of Philox4x32-10 (kat_vectors: 6627e8d5 e169c58d bc57ac4c 9b00dbd8 for key 0, counter 0).
#include "attention/masks/random_blocks.h"

#include <gtest/gtest.h>

#include <vector>

#include "attention/masks/mask_oracle.h"

namespace attnd {
namespace {

using Blocks = std::vector<uint32_t>;

TEST(RandomBlocks, DrawsTheKnownAnswers) {
  EXPECT_EQ(DrawRandomBlocks({64, 3, 7, false}, 0, 0, 64, {}), Blocks({25, 55, 48}));
  EXPECT_EQ(DrawRandomBlocks({64, 3, 7, false}, 63, 0, 64, {}), Blocks({3, 16, 59}));
  EXPECT_EQ(DrawRandomBlocks({64, 5, 0x123456789abcdef0, true}, 2047, 31, 2048, {}),
            Blocks({645, 496, 781, 1845, 102}));
  EXPECT_EQ(DrawRandomBlocks({32, 6, 42, true}, -1, 5, 32, {}), Blocks({12, 0, 16, 7, 1, 10}));
}

TEST(RandomBlocks, DrawsOfWhatIsNotExcluded) {
  EXPECT_EQ(DrawRandomBlocks({64, 3, 7, false}, 10, 0, 64, {{9, 12}}), Blocks({12, 37, 17}));
  EXPECT_EQ(DrawRandomBlocks({16, 9, 1, false}, 2, 0, 5, {{2, 3}}), Blocks({0, 4, 3, 1}));
  EXPECT_EQ(DrawRandomBlocks({16, 9, 1, false}, 2, 0, 5, {{0, 5}}), Blocks());
}

TEST(RandomBlocks, IgnoresTheHeadUnlessAskedFor) {
  EXPECT_EQ(DrawRandomBlocks({64, 3, 7, false}, 0, 9, 64, {}), Blocks({25, 55, 48}));
  EXPECT_NE(DrawRandomBlocks({64, 3, 7, true}, 0, 9, 64, {}), Blocks({25, 55, 48}));
}

// The same answers of the oracle, which has a generator of its own.
TEST(RandomBlocks, AgreeWithTheOracle) {
  MaskSpec spec;
  spec.pattern = {MaskExpr{RandomBlocks{64, 3, 7, false}, {MaskExpr{RelativeWindow{64, 64}, {}}}}};
  spec.pattern_of = {0};
  const MaskCall call = {1, 1, 4096, 4096, {0}};
  const MaskOracle oracle(spec, call);
  Blocks seen;
  for (int64_t c = 0; c < 64; ++c) {
    if (oracle.IsVisible(0, 0, 640, c * 64 + 5)) seen.push_back(static_cast<uint32_t>(c));
  }
  // The window of ±64 holds no block of row of blocks 10 but the block on the diagonal entirely.
  EXPECT_EQ(seen, [] {
    Blocks drawn = DrawRandomBlocks({64, 3, 7, false}, 10, 0, 64, {{10, 11}});
    std::sort(drawn.begin(), drawn.end());
    return drawn;
  }());
}

}  // namespace
}  // namespace attnd
