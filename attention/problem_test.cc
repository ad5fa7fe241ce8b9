#include "attention/problem.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

Problem Dense() {
  return {.batch = 2,
          .q_heads = 4,
          .kv_heads = 2,
          .q_len = 8,
          .kv_len = 8,
          .qk_head_dim = 16,
          .v_head_dim = 16};
}

Problem Packed() {
  Problem p = Dense();
  p.layout = Layout::kPackedThd;
  p.cu_seqlens_q = {0, 3, 8};
  p.cu_seqlens_k = {0, 3, 8};
  return p;
}

struct Refusal {
  const char* name;
  std::function<void(Problem&)> spoil;
  const char* message;
  Problem problem = Dense();
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const Refusal kSizes[] = {
    {"no batch", [](Problem& p) { p.batch = 0; }, "problem.batch: expected 1..1048576, got 0"},
    {"large batch", [](Problem& p) { p.batch = 1048577; },
     "problem.batch: expected 1..1048576, got 1048577"},
    {"no q_heads", [](Problem& p) { p.q_heads = 0; }, "problem.q_heads: expected 1..65536, got 0"},
    {"many q_heads", [](Problem& p) { p.q_heads = 65537; },
     "problem.q_heads: expected 1..65536, got 65537"},
    {"no kv_heads", [](Problem& p) { p.kv_heads = 0; },
     "problem.kv_heads: expected 1..65536, got 0"},
    {"no divisor", [](Problem& p) { p.kv_heads = 3; },
     "problem.kv_heads: expected a divisor of q_heads = 4, got 3"},
    {"more kv_heads", [](Problem& p) { p.kv_heads = 8; },
     "problem.kv_heads: expected a divisor of q_heads = 4, got 8"},
    {"no q_len", [](Problem& p) { p.q_len = 0; }, "problem.q_len: expected 1..1048576, got 0"},
    {"long q_len", [](Problem& p) { p.q_len = 1048577; },
     "problem.q_len: expected 1..1048576, got 1048577"},
    {"negative kv_len", [](Problem& p) { p.kv_len = -1; },
     "problem.kv_len: expected 1..1048576, got -1"},
    {"long kv_len", [](Problem& p) { p.kv_len = 1048577; },
     "problem.kv_len: expected 1..1048576, got 1048577"},
    {"no head_dim", [](Problem& p) { p.qk_head_dim = 0; },
     "problem.qk_head_dim: expected 1..256, got 0"},
    {"large head_dim", [](Problem& p) { p.qk_head_dim = 257; },
     "problem.qk_head_dim: expected 1..256, got 257"},
    {"large v_head_dim", [](Problem& p) { p.v_head_dim = 257; },
     "problem.v_head_dim: expected 1..256, got 257"},
    {"element", [](Problem& p) { p.element = static_cast<ElementType>(0); },
     "problem.element: expected 1..3, got 0"},
    {"layout", [](Problem& p) { p.layout = static_cast<Layout>(5); },
     "problem.layout: expected 1..4, got 5"},
    {"q elements", [](Problem& p) { p.batch = p.q_len = 1048576; },
     "q: expected at most 1099511627776 elements, got more"},
    {"k elements", [](Problem& p) { p.batch = p.kv_len = 1048576; },
     "k: expected at most 1099511627776 elements, got more"},
    {"v elements",
     [](Problem& p) {
       p.batch = 131072;
       p.kv_len = 1048576;
       p.kv_heads = 1;
       p.qk_head_dim = 1;
     },
     "v: expected at most 1099511627776 elements, got more"},
    {"o elements",
     [](Problem& p) {
       p.batch = 1048576;
       p.q_len = 262144;
       p.kv_len = 1;
       p.qk_head_dim = 1;
     },
     "o: expected at most 1099511627776 elements, got more"},
    {"product beyond 64 bits",
     [](Problem& p) {
       p.batch = p.q_len = 1048576;
       p.q_heads = p.kv_heads = 65536;
       p.qk_head_dim = 256;
     },
     "q: expected at most 1099511627776 elements, got more"},
};

const Refusal kScores[] = {
    {"scale NaN", [](Problem& p) { p.scale = kNan; },
     "problem.scale: expected a finite number, got nan"},
    {"scale infinite", [](Problem& p) { p.scale = kInfinity; },
     "problem.scale: expected a finite number, got inf"},
    {"softcap NaN", [](Problem& p) { p.softcap = kNan; },
     "problem.softcap: expected a finite number, got nan"},
    {"softcap negative", [](Problem& p) { p.softcap = -1; },
     "problem.softcap: expected 0 or above, got -1"},
    {"window left", [](Problem& p) { p.window_left = -2; },
     "problem.window.left: expected -1..2147483647, got -2"},
    {"window right", [](Problem& p) { p.window_right = int64_t{1} << 31; },
     "problem.window.right: expected -1..2147483647, got 2147483648"},
    {"no alignment",
     [](Problem& p) {
       p.causal = true;
       p.kv_len = 9;
     },
     "problem.alignment: expected top_left, bottom_right or offsets, since causal, window or ALiBi "
     "depend on it and the lengths of queries and keys differ, got none"},
    {"no alignment beside ALiBi and key lengths",
     [](Problem& p) {
       p.alibi_slopes = {1, 1, 1, 1};
       p.kv_lengths = {8, 7};
     },
     "problem.alignment: expected top_left, bottom_right or offsets, since causal, window or ALiBi "
     "depend on it and the lengths of queries and keys differ, got none"},
    {"no alignment in a packed layout",
     [](Problem& p) {
       p.window_left = 1;
       p.cu_seqlens_k = {0, 4, 8};
     },
     "problem.alignment: expected top_left, bottom_right or offsets, since causal, window or ALiBi "
     "depend on it and the lengths of queries and keys differ, got none",
     Packed()},
    {"offsets without their alignment", [](Problem& p) { p.offsets = {1}; },
     "problem.alignment.offsets: expected none beside another alignment, got 1"},
    {"no offsets", [](Problem& p) { p.alignment = Alignment::kOffsets; },
     "problem.alignment.offsets.offset: expected 1 or batch = 2 entries, got 0"},
    {"wrong number of offsets",
     [](Problem& p) {
       p.alignment = Alignment::kOffsets;
       p.offsets = {1, 2, 3};
     },
     "problem.alignment.offsets.offset: expected 1 or batch = 2 entries, got 3"},
    {"far offset",
     [](Problem& p) {
       p.alignment = Alignment::kOffsets;
       p.offsets = {1, -1048577};
     },
     "problem.alignment.offsets.offset[1]: expected -1048576..1048576, got -1048577"},
    {"slopes",
     [](Problem& p) {
       p.alibi_slopes = {1, 2};
     },
     "problem.alibi.slope: expected q_heads = 4 or batch·q_heads = 8 entries, got 2"},
    {"slope NaN",
     [](Problem& p) {
       p.alibi_slopes = {1, 1, kNan, 1};
     },
     "problem.alibi.slope[2]: expected a finite number, got nan"},
};

const Refusal kLengths[] = {
    {"key lengths", [](Problem& p) { p.kv_lengths = {8}; },
     "problem.lengths.kv_len: expected batch = 2 entries, got 1"},
    {"key length",
     [](Problem& p) {
       p.kv_lengths = {8, 9};
     },
     "problem.lengths.kv_len[1]: expected 0..8, got 9"},
    {"negative key length",
     [](Problem& p) {
       p.kv_lengths = {-1, 8};
     },
     "problem.lengths.kv_len[0]: expected 0..8, got -1"},
    {"cu_seqlens in a dense layout",
     [](Problem& p) {
       p.cu_seqlens_k = {0, 4, 8};
     },
     "problem.lengths.cu_seqlens_k: expected none in a dense layout, got 3"},
    {"key lengths in a packed layout",
     [](Problem& p) {
       p.kv_lengths = {1, 1};
     },
     "problem.lengths.kv_len: expected none in a packed layout, got 2", Packed()},
    {"no cu_seqlens", [](Problem& p) { p.cu_seqlens_q.clear(); },
     "problem.lengths.cu_seqlens_q: expected batch + 1 = 3 entries, got 0", Packed()},
    {"cu_seqlens start", [](Problem& p) { p.cu_seqlens_q[0] = 1; },
     "problem.lengths.cu_seqlens_q[0]: expected 0, got 1", Packed()},
    {"cu_seqlens fall", [](Problem& p) { p.cu_seqlens_k[1] = 9; },
     "problem.lengths.cu_seqlens_k[2]: expected at least 9, got 8", Packed()},
    {"cu_seqlens negative", [](Problem& p) { p.cu_seqlens_k[1] = -1; },
     "problem.lengths.cu_seqlens_k[1]: expected at least 0, got -1", Packed()},
    {"cu_seqlens end", [](Problem& p) { p.cu_seqlens_k[2] = 7; },
     "problem.lengths.cu_seqlens_k[2]: expected the total length 8, got 7", Packed()},
};

const Refusal kExtras[] = {
    {"mask batch",
     [](Problem& p) {
       p.bool_mask = BoolMask{{3, 1, 1, 1}};
     },
     "problem.bool_mask.shape[0]: expected 1 or 2, got 3"},
    {"mask heads",
     [](Problem& p) {
       p.bool_mask = BoolMask{{1, 2, 1, 1}};
     },
     "problem.bool_mask.shape[1]: expected 1 or 4, got 2"},
    {"mask rows",
     [](Problem& p) {
       p.bool_mask = BoolMask{{1, 1, 0, 1}};
     },
     "problem.bool_mask.shape[2]: expected 1 or 8, got 0"},
    {"mask columns of the longest sequence",
     [](Problem& p) {
       p.bool_mask = BoolMask{{1, 1, 1, 8}};
     },
     "problem.bool_mask.shape[3]: expected 1 or 5, got 8", Packed()},
    {"bias columns",
     [](Problem& p) {
       p.bias = Bias{ElementType::kFloat32, {1, 1, 1, -8}, false};
     },
     "problem.bias.shape[3]: expected 1 or 8, got -8"},
    {"bias element",
     [](Problem& p) {
       p.bias = Bias{static_cast<ElementType>(4), {}, false};
     },
     "problem.bias.element: expected 1..3, got 4"},
    {"bias elements",
     [](Problem& p) {
       p.q_len = p.kv_len = 1048576;
       p.bias = Bias{ElementType::kFloat32, {2, 1, 1048576, 1048576}, false};
     },
     "problem.bias.shape: expected at most 1099511627776 elements, got more"},
    {"sink logits without a sink", [](Problem& p) { p.sink_logits = {0}; },
     "problem.denominator.sink: expected none, got 1"},
    {"no sink logits", [](Problem& p) { p.denominator = DenominatorKind::kSink; },
     "problem.denominator.sink.logit: expected q_heads = 4 entries, got 0"},
    {"sink logit",
     [](Problem& p) {
       p.denominator = DenominatorKind::kSink;
       p.sink_logits = {0, 0, 0, -kInfinity};
     },
     "problem.denominator.sink.logit[3]: expected a finite number, got -inf"},
    {"dropout", [](Problem& p) { p.dropout.threshold = 256; },
     "problem.dropout.p · 256: expected 0..255, got 256"},
    {"shard batch", [](Problem& p) { p.shard.batch_offset = -1; },
     "problem.shard.batch_offset: expected 0..1048576, got -1"},
    {"shard head", [](Problem& p) { p.shard.q_head_offset = 65537; },
     "problem.shard.q_head_offset: expected 0..65536, got 65537"},
    {"shard total",
     [](Problem& p) {
       p.shard.q_head_offset = 2;
       p.shard.total_q_heads = 5;
     },
     "problem.shard.total_q_heads: expected 6..131072, got 5"},
    {"heads that the dropout generator cannot tell apart",
     [](Problem& p) {
       p.dropout.threshold = 1;
       p.shard = {1048576, 0, 65536};
     },
     "problem.dropout: expected at most 4294967296 heads over the whole batch, got 68719607808"},
};

void ExpectRefused(absl::Span<const Refusal> refusals) {
  for (const Refusal& refusal : refusals) {
    Problem p = refusal.problem;
    ASSERT_TRUE(Validate(p).ok()) << refusal.name;
    refusal.spoil(p);
    absl::Status status = Validate(p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << refusal.name;
    EXPECT_EQ(status.message(), refusal.message) << refusal.name;
  }
}

TEST(Validate, NamesTheFieldOfEachWrongSize) { ExpectRefused(kSizes); }
TEST(Validate, NamesTheFieldOfEachWrongScoreOption) { ExpectRefused(kScores); }
TEST(Validate, NamesTheFieldOfEachWrongLength) { ExpectRefused(kLengths); }
TEST(Validate, NamesTheFieldOfEachWrongMaskBiasDenominatorAndShard) { ExpectRefused(kExtras); }

TEST(Validate, AcceptsEachLimit) {
  Problem p = Dense();
  p.batch = kMaxBatch;
  p.q_heads = p.kv_heads = 1;
  p.q_len = kMaxLength;
  p.kv_len = 1;
  p.qk_head_dim = p.v_head_dim = 1;
  EXPECT_TRUE(Validate(p).ok()) << Validate(p);
  p = Dense();
  p.q_heads = p.kv_heads = kMaxHeads;
  p.batch = 1;
  p.qk_head_dim = p.v_head_dim = 256;
  p.shard = {kMaxBatch, kMaxHeads, 2 * kMaxHeads};
  EXPECT_TRUE(Validate(p).ok()) << Validate(p);
}

bool BruteForceVisible(const Problem& p, const Sequence& s, int64_t i, int64_t j) {
  int64_t diagonal = i + s.offset;
  return !(p.causal && j > diagonal) && !(p.window_left >= 0 && j < diagonal - p.window_left) &&
         !(p.window_right >= 0 && j > diagonal + p.window_right);
}

TEST(Problem, IsTheSameForwardOnlyWithTheSameMask) {
  const auto masked = [](int32_t left) {
    Problem p = Dense();
    SetMask(Window(left, 0), p);
    return p;
  };
  EXPECT_TRUE(SameForward(masked(3), masked(3)));  // two objects
  EXPECT_FALSE(SameForward(masked(3), masked(4)));
  EXPECT_FALSE(SameForward(masked(3), Dense()));
  Problem moved = masked(3);
  moved.mask_origin.row_begin = 1;
  EXPECT_FALSE(SameForward(masked(3), moved));
}

TEST(VisibleRange, EqualsThePredicateForRandomProblems) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 1500});
    for (int64_t b = 0; b < p.batch; ++b) {
      Sequence s = p.SequenceAt(b);
      for (int64_t i = 0; i < s.q_len; ++i) {
        KeyRange range = p.VisibleRange(s, i);
        ASSERT_LE(0, range.begin);
        ASSERT_LE(range.begin, range.end);
        ASSERT_LE(range.end, s.kv_len);
        for (int64_t j = 0; j < s.kv_len; ++j) {
          ASSERT_EQ(range.begin <= j && j < range.end, BruteForceVisible(p, s, i, j))
              << "seed " << seed << " row " << i << " key " << j << ": " << ProblemText(p);
        }
      }
    }
  }
}

TEST(VisibleRange, DoesNotOverflowAtTheFarthestOffsetsAndWindows) {
  Problem p = Dense();
  p.alignment = Alignment::kOffsets;
  p.window_left = p.window_right = INT32_MAX;
  for (int64_t offset : {-kMaxLength, kMaxLength}) {
    p.offsets = {static_cast<int32_t>(offset)};
    KeyRange range = p.VisibleRange(p.SequenceAt(0), 7);
    EXPECT_EQ(range.begin, 0);
    EXPECT_EQ(range.end, 8);
  }
}

TEST(SequenceAt, PlacesTheDiagonalByAlignment) {
  Problem p = Dense();
  p.kv_len = 12;
  p.kv_lengths = {12, 5};
  p.alignment = Alignment::kBottomRight;
  EXPECT_EQ(p.SequenceAt(0).offset, 4);
  EXPECT_EQ(p.SequenceAt(1).offset, -3);
  p.alignment = Alignment::kTopLeft;
  EXPECT_EQ(p.SequenceAt(1).offset, 0);
  p.alignment = Alignment::kOffsets;
  p.offsets = {6, -7};
  EXPECT_EQ(p.SequenceAt(1).offset, -7);
  p.offsets = {6};
  EXPECT_EQ(p.SequenceAt(1).offset, 6);
}

TEST(SequenceAt, CutsPackedSequencesAtTheirBounds) {
  Problem p = Packed();
  p.cu_seqlens_q = {0, 0, 8};
  Sequence first = p.SequenceAt(0), second = p.SequenceAt(1);
  EXPECT_EQ(first.q_len, 0);
  EXPECT_EQ(first.kv_len, 3);
  EXPECT_EQ(second.q_begin, 0);
  EXPECT_EQ(second.q_len, 8);
  EXPECT_EQ(second.kv_begin, 3);
  EXPECT_EQ(second.kv_len, 5);
  EXPECT_EQ(p.MaxQueryLength(), 8);
  EXPECT_EQ(p.MaxKeyLength(), 5);
  EXPECT_EQ(p.LseIndex(1, 2, second, 4), 2 * 8 + 4);
}

TEST(DropoutHeadIndex, CountsInTheWholeTensors) {
  Problem p = Dense();
  EXPECT_EQ(p.DropoutHeadIndex(1, 3), 1 * 4 + 3);
  p.shard = {5, 8, 32};
  EXPECT_EQ(p.DropoutHeadIndex(1, 3), 6 * 32 + 11);
  p.shard = {5, 8, 0};
  EXPECT_EQ(p.DropoutHeadIndex(1, 3), 6 * 12 + 11);
}

}  // namespace
}  // namespace attnd
