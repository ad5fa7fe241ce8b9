#include <gtest/gtest.h>

#include "attention/problem.h"

namespace attnd {
namespace {

Problem DenseOfLengths(int64_t q_len, int64_t kv_len) {
  Problem p;
  p.batch = 3;
  p.q_heads = p.kv_heads = 2;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = 8;
  return p;
}

TEST(MaskCall, HasOneOffsetWhereAllAreEqual) {
  Problem p = DenseOfLengths(10, 30);
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 10, 30, {0}}));
  p.alignment = Alignment::kBottomRight;
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 10, 30, {20}}));
  p.alignment = Alignment::kOffsets;
  p.offsets = {-4};
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 10, 30, {-4}}));
}

TEST(MaskCall, HasAnOffsetForEachEntryWhereKeyLengthsMoveTheDiagonal) {
  Problem p = DenseOfLengths(10, 30);
  p.alignment = Alignment::kBottomRight;
  p.kv_lengths = {30, 12, 5};
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 10, 30, {20, 2, -5}}));
  p.alignment = Alignment::kTopLeft;
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 10, 30, {0}}));
}

TEST(MaskCall, TakesTheLongestPackedSequence) {
  Problem p = DenseOfLengths(20, 33);
  p.layout = Layout::kPackedThd;
  p.cu_seqlens_q = {0, 4, 15, 20};
  p.cu_seqlens_k = {0, 20, 31, 33};
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 11, 20, {0}}));
  p.alignment = Alignment::kBottomRight;
  EXPECT_EQ(MaskCallOf(p), (MaskCall{3, 2, 11, 20, {16, 0, -3}}));
}

}  // namespace
}  // namespace attnd
