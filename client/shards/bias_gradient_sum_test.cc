#include "client/shards/bias_gradient_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "client/shards/shard_plan.h"

namespace attnd {
namespace {

constexpr int64_t kBatch = 3, kHeads = 4, kRows = 2, kColumns = 5;

Problem WithBias(int64_t batch, int64_t heads) {
  Problem p;
  p.batch = kBatch;
  p.q_heads = p.kv_heads = kHeads;
  p.q_len = kRows;
  p.kv_len = kColumns;
  p.qk_head_dim = p.v_head_dim = 8;
  p.bias = Bias{ElementType::kFloat32, {batch, heads, kRows, kColumns}, true};
  return p;
}

// u_bh: of magnitudes so different that every order of addition gives other bits.
std::vector<float> Addend(int64_t b, int64_t h) {
  Random random(100 * b + h);
  std::vector<float> values(kRows * kColumns);
  for (float& value : values) {
    value = static_cast<float>(random.Normal() * std::pow(10.0, random.Between(-4, 4)));
  }
  return values;
}

void AddTo(std::vector<float>& sum, const std::vector<float>& addend, bool first) {
  for (size_t n = 0; n < sum.size(); ++n) sum[n] = first ? addend[n] : sum[n] + addend[n];
}

// The contract's order, in the plainest way.
std::vector<float> Expected(const Problem& p) {
  const BroadcastShape& s = p.bias->shape;
  std::vector<float> all(s.elements());
  for (int64_t head = 0; head < s.heads; ++head) {
    std::vector<float> total(kRows * kColumns);
    for (int64_t b = 0; b < kBatch; ++b) {
      std::vector<float> entry(kRows * kColumns);
      for (int64_t h = 0; h < kHeads; ++h) {
        if (s.heads == 1 || h == head) AddTo(entry, Addend(b, h), s.heads != 1 || h == 0);
      }
      AddTo(total, entry, s.batch != 1 || b == 0);
      std::copy(total.begin(), total.end(),
                all.begin() + ((s.batch == 1 ? 0 : b) * s.heads + head) * kRows * kColumns);
    }
  }
  return all;
}

// Makes a server's answer for a shard: sums over what its shape broadcasts.
std::vector<float> ShardGradient(const Problem& p, const ShardRange& r) {
  BroadcastShape s = SubProblem(p, r).bias->shape;
  std::vector<float> out(s.elements());
  for (int64_t head = 0; head < s.heads; ++head) {
    std::vector<float> total(kRows * kColumns);
    for (int64_t b = 0; b < r.batch_count; ++b) {
      std::vector<float> entry(kRows * kColumns);
      for (int64_t h = 0; h < r.kv_head_count; ++h) {
        if (s.heads != 1 && h != head) continue;
        AddTo(entry, Addend(r.batch_begin + b, r.kv_head_begin + h), s.heads != 1 || h == 0);
      }
      AddTo(total, entry, s.batch != 1 || b == 0);
      std::copy(total.begin(), total.end(),
                out.begin() + ((s.batch == 1 ? 0 : b) * s.heads + head) * kRows * kColumns);
    }
  }
  return out;
}

TEST(BiasGradientSum, RebuildsTheUnshardedBitsInWhateverOrderShardsArrive) {
  for (int64_t batch : {int64_t{1}, kBatch}) {
    for (int64_t heads : {int64_t{1}, kHeads}) {
      Problem p = WithBias(batch, heads);
      for (int64_t target : {1, 2000, 2500}) {
        auto shards = PlanShards(p, Direction::kBackward, {.target_bytes = target});
        ASSERT_TRUE(shards.ok());
        std::vector<int64_t> order(shards->size());
        std::iota(order.begin(), order.end(), 0);
        for (uint64_t seed = 0; seed < 5; ++seed) {
          SCOPED_TRACE(
              absl::StrCat("bias ", batch, "x", heads, " shards ", shards->size(), " seed ", seed));
          std::vector<float> d_bias(p.bias->shape.elements(), NAN);
          BiasGradientSum sum(p, *shards, d_bias.data());
          for (int64_t index : order) sum.Add(index, ShardGradient(p, (*shards)[index]));
          EXPECT_EQ(d_bias, Expected(p));
          Random random(seed);
          for (size_t n = order.size() - 1; n > 0; --n) {
            std::swap(order[n], order[random.Between(0, n)]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attnd
