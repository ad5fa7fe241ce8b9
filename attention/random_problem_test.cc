#include "attention/random_problem.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "attention/problem_text.h"
#include "attention/reference.h"

namespace attnd {
namespace {

int64_t Pairs(const Problem& p) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    pairs += p.q_heads * p.SequenceAt(b).q_len * p.SequenceAt(b).kv_len;
  }
  return pairs;
}

TEST(RandomProblem, IsValidAndBoundedForEachSeed) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    RandomProblemLimits limits{.max_pairs = 1 + static_cast<int64_t>(seed % 5000),
                               .max_head_dim = 1 + static_cast<int64_t>(seed % 256)};
    Problem p = RandomProblem(seed, limits);  // checks Validate
    EXPECT_LE(Pairs(p), limits.max_pairs) << "seed " << seed << ": " << ProblemText(p);
    EXPECT_LE(p.qk_head_dim, limits.max_head_dim);
    EXPECT_LE(p.v_head_dim, limits.max_head_dim);
  }
}

TEST(RandomProblem, ReachesEveryOptionAmongItsSeeds) {
  std::map<std::string, int> seen;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Problem p = RandomProblem(seed);
    seen[absl::StrCat("element", static_cast<int>(p.element))]++;
    seen[absl::StrCat("layout", static_cast<int>(p.layout))]++;
    seen[absl::StrCat("alignment", static_cast<int>(p.alignment))]++;
    seen[absl::StrCat("denominator", static_cast<int>(p.denominator))]++;
    seen["causal"] += p.causal;
    seen["window"] += p.window_left >= 0 && p.window_right >= 0;
    seen["half_window"] += (p.window_left >= 0) != (p.window_right >= 0);
    seen["grouped"] += p.group_size() > 1;
    seen["dims_differ"] += p.qk_head_dim != p.v_head_dim;
    seen["scale_zero"] += p.scale.has_value() && *p.scale == 0;
    seen["scale_negative"] += p.scale.has_value() && *p.scale < 0;
    seen["softcap"] += p.softcap > 0;
    seen["dropout"] += p.dropout.threshold > 0;
    seen["mask"] += p.bool_mask.has_value();
    seen["bias_gradient"] += p.bias && p.bias->want_gradient;
    seen["alibi_per_batch"] += !p.alibi_slopes.empty() && p.alibi_slopes.size() != p.q_heads;
    seen["offsets_per_batch"] += p.offsets.size() > 1;
    seen["shard"] += p.shard.q_head_offset > 0;
    seen["accumulate_f16"] += p.accumulate == AccumulateType::kFloat16;
    for (int64_t b = 0; b < p.batch; ++b) {
      seen["no_keys"] += !IsPacked(p.layout) && p.SequenceAt(b).kv_len == 0;
      seen["empty_sequence"] += IsPacked(p.layout) && p.SequenceAt(b).q_len == 0;
    }
  }
  EXPECT_EQ(seen.size(), 3 + 4 + 4 + 3 + 17);
  for (const auto& [option, count] : seen) EXPECT_GT(count, 0) << option;
}

TEST(RandomInputs, AreTheSameForTheSameSeedAndAlignedTo64Bytes) {
  Problem p = RandomProblem(5);
  ProblemInputs a = RandomInputs(p, 1), b = RandomInputs(p, 1), c = RandomInputs(p, 2);
  EXPECT_EQ(std::memcmp(a.k.data(), b.k.data(), a.k.size()), 0);
  EXPECT_NE(std::memcmp(a.k.data(), c.k.data(), a.k.size()), 0);
  for (const AlignedBytes* tensor : {&a.q, &a.k, &a.v, &a.d_o, &a.d_lse}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data()) % 64, 0);
  }
}

TEST(RandomInputs, ReachLargeLogitsWhenHuge) {
  Problem p{.batch = 1,
            .q_heads = 1,
            .kv_heads = 1,
            .q_len = 64,
            .kv_len = 64,
            .qk_head_dim = 32,
            .v_head_dim = 32,
            .element = ElementType::kFloat16};
  ProblemInputs in = RandomInputs(p, 1, Values::kHuge);
  Reference reference(p, {in.q.data(), in.k.data(), in.v.data()});
  double most = 0;
  for (int64_t i = 0; i < p.q_len; ++i) {
    for (double score : reference.Row(0, 0, p.SequenceAt(0), i).score) {
      most = std::max(most, std::fabs(score));
    }
  }
  EXPECT_GT(most, 1e4);
  EXPECT_LT(most, 6.1e4);
}

TEST(ProblemText, NamesWhatDiffersFromThePlainCase) {
  Problem p{.batch = 2,
            .q_heads = 8,
            .kv_heads = 2,
            .q_len = 128,
            .kv_len = 256,
            .qk_head_dim = 64,
            .v_head_dim = 64,
            .element = ElementType::kFloat16};
  EXPECT_EQ(ProblemText(p), "float16 bhld b2 h8/2 q128 k256 d64");
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.dropout.threshold = 26;
  EXPECT_EQ(
      ProblemText(p),
      "float16 bhld b2 h8/2 q128 k256 d64 causal bottom_right dropout=26/256,seed=0,offset=0");
}

}  // namespace
}  // namespace attnd
