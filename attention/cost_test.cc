#include "attention/cost.h"

#include <gtest/gtest.h>

#include "attention/problem_text.h"
#include "attention/random_problem.h"

namespace attnd {
namespace {

Problem Square(int64_t length) {
  return {.batch = 1,
          .q_heads = 1,
          .kv_heads = 1,
          .q_len = length,
          .kv_len = length,
          .qk_head_dim = 8,
          .v_head_dim = 8};
}

int64_t BruteForcePairs(const Problem& p) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence s = p.SequenceAt(b);
    for (int64_t i = 0; i < s.q_len; ++i) {
      for (int64_t j = 0; j < s.kv_len; ++j) {
        int64_t from_diagonal = j - i - s.offset;
        bool visible = !(p.causal && from_diagonal > 0) &&
                       !(p.window_left >= 0 && from_diagonal < -p.window_left) &&
                       !(p.window_right >= 0 && from_diagonal > p.window_right);
        pairs += visible;
      }
    }
  }
  return pairs * p.q_heads;
}

TEST(VisiblePairs, EqualsBruteForceForRandomProblems) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 2000});
    ASSERT_EQ(VisiblePairs(p), BruteForcePairs(p)) << "seed " << seed << ": " << ProblemText(p);
  }
}

TEST(VisiblePairs, EqualsTheKnownFormulas) {
  int64_t n = 100, w = 7;
  Problem causal = Square(n);
  causal.causal = true;
  EXPECT_EQ(VisiblePairs(causal), n * (n + 1) / 2);
  Problem window = Square(n);
  window.window_left = window.window_right = w;
  EXPECT_EQ(VisiblePairs(window), n * (2 * w + 1) - w * (w + 1));
  Problem causal_window = Square(n);
  causal_window.causal = true;
  causal_window.window_left = w;
  EXPECT_EQ(VisiblePairs(causal_window), n * (w + 1) - w * (w + 1) / 2);
  Problem wide = causal;
  wide.kv_len = 250;
  wide.alignment = Alignment::kBottomRight;
  EXPECT_EQ(VisiblePairs(wide), n * (250 - n) + n * (n + 1) / 2);
  wide.alignment = Alignment::kTopLeft;
  EXPECT_EQ(VisiblePairs(wide), n * (n + 1) / 2);
  Problem documents = Square(60);
  documents.batch = 3;
  documents.layout = Layout::kPackedThd;
  documents.cu_seqlens_q = documents.cu_seqlens_k = {0, 10, 30, 60};
  EXPECT_EQ(VisiblePairs(documents), 100 + 400 + 900);
  documents.causal = true;
  EXPECT_EQ(VisiblePairs(documents), 55 + 210 + 465);
}

TEST(VisiblePairs, AnswersAtOnceAndExactlyAtTheLimits) {
  Problem p = Square(kMaxLength);
  p.batch = kMaxBatch;
  p.qk_head_dim = p.v_head_dim = 1;
  ASSERT_TRUE(Validate(p).ok());
  EXPECT_EQ(VisiblePairs(p), int64_t{1} << 60);
  p.causal = true;
  EXPECT_EQ(VisiblePairs(p), kMaxBatch * (kMaxLength * (kMaxLength + 1) / 2));
  p.causal = false;
  p.alignment = Alignment::kOffsets;
  p.offsets = {-static_cast<int32_t>(kMaxLength)};
  p.window_left = p.window_right = INT32_MAX;
  EXPECT_EQ(VisiblePairs(p), int64_t{1} << 60);
  p.window_right = 0;
  EXPECT_EQ(VisiblePairs(p), 0);
}

TEST(Flops, CountTwoProductsForwardAndFiveBackward) {
  Problem p = Square(10);
  p.v_head_dim = 4;
  EXPECT_EQ(Flops(p, Direction::kForward), 2.0 * 100 * (8 + 4));
  EXPECT_EQ(Flops(p, Direction::kBackward), 2.5 * 2.0 * 100 * (8 + 4));
}

TEST(BytesOf, CountsWhatCrossesTheWire) {
  Problem p = Square(10);
  p.element = ElementType::kFloat16;
  p.v_head_dim = 4;
  PayloadBytes forward = BytesOf(p, Direction::kForward);
  EXPECT_EQ(forward.input, 2 * (80 + 80 + 40));
  EXPECT_EQ(forward.output, 2 * 40 + 4 * 10);
  PayloadBytes backward = BytesOf(p, Direction::kBackward);
  EXPECT_EQ(backward.input, 2 * (80 + 80 + 40 + 40 + 40) + 4 * (10 + 10));
  EXPECT_EQ(backward.output, 2 * (80 + 80 + 40));
  p.bool_mask = BoolMask{{1, 1, 10, 10}};
  p.bias = Bias{ElementType::kBFloat16, {1, 1, 1, 10}, true};
  p.denominator = DenominatorKind::kSink;
  p.sink_logits = {0};
  EXPECT_EQ(BytesOf(p, Direction::kForward).input, forward.input + 10 * 2 + 2 * 10);
  EXPECT_EQ(BytesOf(p, Direction::kBackward).output, backward.output + 4 * 10 + 4);
}

}  // namespace
}  // namespace attnd
