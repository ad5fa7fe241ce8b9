#include "client/shards/shard_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"

namespace attnd {
namespace {

Problem Dense(int64_t batch, int64_t heads, int64_t length) {
  return PlainProblem(batch, heads, length, 64);
}

TEST(PlanShards, CoversEachHeadOfEachEntryOnceInOrderWithinTheLimits) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Problem p = RandomProblem(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", ProblemText(p)));
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (int64_t target : {int64_t{1}, int64_t{30'000}, int64_t{1} << 30}) {
        PlanLimits limits{.target_bytes = target, .max_message_bytes = int64_t{1} << 30};
        auto shards = PlanShards(p, direction, limits);
        ASSERT_TRUE(shards.ok()) << shards.status();
        std::set<std::pair<int64_t, int64_t>> seen;
        ShardRange last;
        for (const ShardRange& r : *shards) {
          auto place = [](const ShardRange& x) {
            return std::tuple(x.batch_begin, x.kv_head_begin, x.row_begin);
          };
          EXPECT_TRUE(&r == &shards->front() || place(last) < place(r));
          if (r.row_begin != 0) {
            EXPECT_EQ(r.row_begin, last.row_begin + last.row_count);
          }
          last = r;
          for (int64_t b = 0; b < r.batch_count && r.row_begin == 0; ++b) {
            for (int64_t g = 0; g < r.kv_head_count; ++g) {
              EXPECT_TRUE(seen.insert({r.batch_begin + b, r.kv_head_begin + g}).second);
            }
          }
          if (IsTrivial(p, r)) continue;
          Problem sub = SubProblem(p, r);
          EXPECT_EQ(Validate(sub), absl::OkStatus());
          EXPECT_LE(MessageSizesOf(sub, direction).request, limits.max_message_bytes);
          // A shard of several pieces keeps to the target.
          if (r.batch_count * r.kv_head_count > 1) {
            MessageSizes bytes = MessageSizesOf(sub, direction);
            EXPECT_LE(std::max(bytes.request, bytes.reply), target);
          }
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), p.batch * p.kv_heads);
        if (target == int64_t{1} << 30) {
          EXPECT_EQ(shards->size(), 1u);
        }
      }
    }
  }
}

TEST(PlanShards, KeepsEntriesWholeWhileTheyFitAndSharesThemEvenly) {
  Problem p = Dense(10, 4, 128);  // 128 KiB of q an entry
  int64_t entry = MessageSizesOf(Dense(1, 4, 128), Direction::kForward).request;
  auto shards = PlanShards(p, Direction::kForward, {.target_bytes = 4 * entry});
  ASSERT_TRUE(shards.ok());
  ASSERT_EQ(shards->size(), 3u);
  for (const ShardRange& r : *shards) {
    EXPECT_EQ(r.kv_head_count, 4);
    EXPECT_GE(r.batch_count, 3);
    EXPECT_LE(r.batch_count, 4);
  }
}

TEST(PlanShards, CutsHeadsWhenAnEntryIsTooLarge) {
  Problem p = Dense(2, 8, 1024);
  int64_t head = MessageSizesOf(Dense(1, 1, 1024), Direction::kForward).request;
  auto shards = PlanShards(p, Direction::kForward, {.target_bytes = 3 * head});
  ASSERT_TRUE(shards.ok());
  EXPECT_EQ(shards->size(), 6u);
  for (const ShardRange& r : *shards) EXPECT_LE(r.batch_count * r.kv_head_count, 3);
}

TEST(PlanShards, TakesExactlyTheLimitAndRefusesOneByteLess) {
  Problem p = Dense(1, 1, 1024);
  MessageSizes bytes = MessageSizesOf(p, Direction::kBackward);
  int64_t limit = std::max(bytes.request, bytes.reply);
  EXPECT_TRUE(PlanShards(p, Direction::kBackward, {.max_message_bytes = limit}).ok());
  absl::Status status =
      PlanShards(p, Direction::kBackward, {.max_message_bytes = limit - 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
}

// A bias shared by all entries would be sent once an entry, and its gradient come back as often, if
// the batch were cut; heads of the whole batch send it once.
TEST(PlanShards, CutsTheWayThatSendsASharedBiasLeast) {
  Problem p = Dense(4, 8, 256);
  p.bias = Bias{ElementType::kFloat32, {1, 8, 256, 256}, true};
  MessageSizes whole = MessageSizesOf(p, Direction::kBackward);
  auto shards = PlanShards(p, Direction::kBackward, {.target_bytes = whole.request / 4});
  ASSERT_TRUE(shards.ok());
  EXPECT_GE(shards->size(), 4u);
  for (const ShardRange& r : *shards) EXPECT_EQ(r.batch_count, 4);
  EXPECT_FALSE(NeedsBiasGradientSum(p, *shards));
}

// The sum's order is that of the entries, whatever would send fewer bytes.
TEST(PlanShards, CutsNoHeadsOfSeveralEntriesWhenABiasGradientSumsOverHeads) {
  Problem p = Dense(2, 3, 256);
  p.bias = Bias{ElementType::kFloat32, {1, 1, 256, 256}, true};
  ShardRange two_heads{0, 1, 0, 2};
  two_heads.expand_bias_batch = two_heads.expand_bias_heads = true;
  MessageSizes bytes = MessageSizesOf(SubProblem(p, two_heads), Direction::kBackward);
  auto shards =
      PlanShards(p, Direction::kBackward, {.target_bytes = std::max(bytes.request, bytes.reply)});
  ASSERT_TRUE(shards.ok());
  EXPECT_EQ(shards->size(), 4u);
  for (const ShardRange& r : *shards) EXPECT_EQ(r.batch_count, 1);
  EXPECT_TRUE(NeedsBiasGradientSum(p, *shards));
}

// One head by rows with like shares of the scores, in multiples of tiles; several by head.
TEST(PlanShards, CutsALongCallForEachDevice) {
  PlanLimits limits{.target_bytes = INT64_MAX, .max_message_bytes = INT64_MAX, .devices = 2};
  Problem p = Dense(1, 1, 1 << 20);
  p.causal = true;
  auto shards = PlanShards(p, Direction::kForward, limits);
  ASSERT_TRUE(shards.ok());
  ASSERT_EQ(shards->size(), 2u);
  const double rows = shards->front().row_count;
  EXPECT_EQ(shards->front().row_count % 128, 0);
  EXPECT_NEAR(rows * rows / (double{1 << 20} * (1 << 20)), 0.5, 1e-3);
  EXPECT_EQ(shards->back().row_begin, shards->front().row_count);
  EXPECT_EQ(shards->back().row_begin + shards->back().row_count, 1 << 20);
  // Gradients of keys would be sums of the pieces', which bytes alone are a reason for.
  for (const bool merge : {true, false}) {
    limits.merge = merge;
    ASSERT_EQ(PlanShards(p, Direction::kForward, limits)->front().cut, Cut::kRows);
    ASSERT_EQ(PlanShards(p, Direction::kBackward, limits)->size(), 1u);
  }
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    shards = PlanShards(Dense(1, 4, 1 << 16), direction, limits);
    ASSERT_EQ(shards->size(), 2u);
    EXPECT_EQ(shards->front().kv_head_count, 2);
    shards = PlanShards(Dense(2, 1, 1 << 16), direction, limits);
    ASSERT_EQ(shards->size(), 2u);
    EXPECT_EQ(shards->front().batch_count, 1);
  }
}

TEST(PlanShards, IsQuickWithMillionsOfEntries) {
  Problem p = Dense(1, 1, 1);
  p.layout = Layout::kPackedThd;
  p.batch = kMaxBatch;
  p.q_len = p.kv_len = kMaxLength;
  for (int64_t b = 0; b <= p.batch; ++b) p.cu_seqlens_q.push_back(static_cast<int32_t>(b));
  p.cu_seqlens_k = p.cu_seqlens_q;
  auto shards = PlanShards(p, Direction::kForward, {});
  ASSERT_TRUE(shards.ok());
  EXPECT_GT(shards->size(), 30u);
  EXPECT_LT(shards->size(), 300u);
}

}  // namespace
}  // namespace attnd
