#include "modules/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "modules/arena.h"
#include "modules/layer_schedule.h"
#include "modules/op_uses.h"
#include "tests/layers/random_module.h"

namespace attnd {
namespace {

constexpr int64_t kPlenty = int64_t{1} << 50;

// ---- Arena.

int64_t MostAlive(const std::vector<ArenaBuffer>& buffers) {
  int64_t most = 0;
  for (const ArenaBuffer& at : buffers) {
    int64_t alive = 0;
    for (const ArenaBuffer& other : buffers) {
      if (other.first <= at.first && other.last >= at.first) alive += other.bytes;
    }
    most = std::max(most, alive);
  }
  return most;
}

void ExpectNoOverlap(const std::vector<ArenaBuffer>& buffers, int64_t size) {
  for (const ArenaBuffer& a : buffers) {
    if (a.bytes == 0) continue;
    ASSERT_GE(a.offset, 0);
    ASSERT_EQ(a.offset % kArenaAlignment, 0);
    ASSERT_LE(a.offset + a.bytes, size);
    for (const ArenaBuffer& b : buffers) {
      if (&a == &b || b.bytes == 0 || a.last < b.first || b.last < a.first) continue;
      ASSERT_TRUE(a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset);
    }
  }
}

TEST(Arena, BuffersThatLiveTogetherShareNoByteAndOthersDo) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<ArenaBuffer> buffers(random.Between(0, 40));
    for (ArenaBuffer& buffer : buffers) {
      buffer.bytes = 100 * random.Between(0, 50);
      buffer.first = random.Between(0, 30);
      buffer.last = buffer.first + random.Between(0, 8);
    }
    const int64_t size = PlaceBuffers(buffers);
    ExpectNoOverlap(buffers, size);
    EXPECT_GE(size, MostAlive(buffers));
  }
  std::vector<ArenaBuffer> chain(50, {.bytes = 1024});
  for (int n = 0; n < 50; ++n) chain[n].first = n, chain[n].last = n + 1;
  EXPECT_EQ(PlaceBuffers(chain), 2 * 1024);
}

TEST(LayerSchedule, BuffersOfRandomBlocksLiveFromWhereTheyAreMade) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const ModuleGraph graph = *ModuleGraph::Make(RandomLayout(random));
    for (Recompute mode : {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers}) {
      std::vector<ArenaBuffer> buffers = BackwardBuffers(graph, 0, mode, {7, 5});
      const int64_t steps = 2 * graph.layout().blocks[0].ops.size();
      for (const ArenaBuffer& buffer : buffers) {
        EXPECT_LE(buffer.first, buffer.last) << "seed " << seed;
        EXPECT_GE(buffer.first, 0);
        EXPECT_LT(buffer.last, steps);
      }
      ExpectNoOverlap(buffers, PlaceBuffers(buffers));
    }
  }
}

TEST(LayerSchedule, OneOperandOfASumHasTheSumsGradient) {
  ModuleLayout layout{.width = 8, .element = ElementType::kFloat32};
  ModuleBlock& block = layout.blocks.emplace_back();
  for (int n = 0; n < 3; ++n) block.parameters.push_back({std::string(1, 'a' + n), {8, 8}});
  const int64_t a = 2, b = 3, c = 4, sum = 5, scaled = 6;  // values by op
  block.ops.push_back({LinearOp{.input = kInputValue, .weight = 0}});
  block.ops.push_back({LinearOp{.input = kInputValue, .weight = 1}});
  block.ops.push_back({LinearOp{.input = b, .weight = 2}});
  block.ops.push_back({BinaryOp{BinaryKind::kAdd, b, a}});          // c reads b, but earlier
  block.ops.push_back({BinaryOp{BinaryKind::kAdd, c, sum, 0.5f}});  // the block's output
  layout.layers.push_back({.prefix = "0."});
  const ModuleGraph graph = *ModuleGraph::Make(std::move(layout));
  EXPECT_EQ(GradientHolders(graph, 0), (std::vector<int64_t>{0, 1, a, sum, scaled, sum, scaled}));
  int64_t gradients = 0;
  for (const ArenaBuffer& buffer : BackwardBuffers(graph, 0, Recompute::kNone, {7, 5})) {
    if (buffer.key % 16 != static_cast<int64_t>(BufferUse::kGradient)) continue;
    ++gradients;
    // b's gradient lies with the sum's. Both are read until the layer's end, for their weights.
    EXPECT_EQ(buffer.last, 2 * 4 - 1);  // the sums share a step
  }
  EXPECT_EQ(gradients, 2);  // of a, and of the sum
}

// ---- What is kept.

TEST(KeptValues, WhatIsNotKeptCanBeComputedAgain) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const ModuleGraph graph = *ModuleGraph::Make(RandomLayout(random));
    const std::vector<ModuleOp>& ops = graph.layout().blocks[0].ops;
    for (Recompute mode : {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers}) {
      std::vector<bool> there = KeptValues(graph, 0, mode);
      const std::vector<bool> again = RecomputedValues(graph, 0, mode);
      there[kMemoryValue] = true;
      for (size_t n = 0; n < ops.size(); ++n) {
        if (!again[n + kFirstOpValue]) continue;
        for (const ValueUse& use : ValuesOf(ops[n])) EXPECT_TRUE(there[use.value]) << seed;
        if (mode == Recompute::kPointwise) {
          EXPECT_TRUE(IsPointwise(ops[n])) << seed;
        }
        there[n + kFirstOpValue] = true;
      }
      const std::vector<bool> needed = NeededValues(graph, 0);
      for (size_t value = 0; value < needed.size(); ++value) {
        EXPECT_TRUE(there[value] || !needed[value]) << "seed " << seed << " value " << value;
      }
    }
  }
}

// ---- Plans.

// A layer of BERT's shape: post-norm, packed qkv, gelu, three dropouts.
ModuleLayout BertLayout(int64_t width, int64_t layers) {
  ModuleLayout layout{.width = width, .element = ElementType::kFloat16};
  layout.wide_element = ElementType::kFloat16;
  ModuleBlock block;
  block.parameters = {{"qkv.w", {3 * width, width}},
                      {"qkv.b", {3 * width}},
                      {"o.w", {width, width}},
                      {"o.b", {width}},
                      {"n1.w", {width}},
                      {"n1.b", {width}},
                      {"up.w", {4 * width, width}},
                      {"up.b", {4 * width}},
                      {"down.w", {width, 4 * width}},
                      {"down.b", {width}},
                      {"n2.w", {width}},
                      {"n2.b", {width}}};
  const int64_t heads = width / 64;
  const auto norm = [](int64_t input, int64_t weight) {
    return NormOp{.input = input, .epsilon = 1e-12f, .weight = weight, .bias = weight + 1};
  };
  block.ops = {
      {LinearOp{0, 0, 1}},
      {AttentionOp{
          .q = {2, 0, heads, 64}, .k = {2, width, heads, 64}, .v = {2, 2 * width, heads, 64}}},
      {LinearOp{3, 2, 3}},
      {DropoutOp{4, 26}},
      {BinaryOp{BinaryKind::kAdd, 0, 5}},
      {norm(6, 4)},
      {LinearOp{7, 6, 7}},
      {ActivationOp{8, ActivationKind::kGelu}},
      {LinearOp{9, 8, 9}},
      {DropoutOp{10, 26}},
      {BinaryOp{BinaryKind::kAdd, 7, 11}},
      {norm(12, 10)}};
  layout.blocks = {block};
  for (int64_t n = 0; n < layers; ++n) layout.layers.push_back({.prefix = absl::StrCat(n, ".")});
  return layout;
}

const OptimizerSpec kAdamW{
    .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};

TEST(ModulePlan, CountsTheBytesOfBertBase) {
  const ModuleGraph graph = *ModuleGraph::Make(BertLayout(768, 12));
  const WeightTable weights(graph);
  auto plan = MakePlan(graph, weights, kAdamW, {.max_rows = 16384, .kept_rows = 16384}, kPlenty);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t matrices = 12 * 12 * 768 * 768, vectors = 12 * 13 * 768;
  EXPECT_EQ(plan->weight_bytes, matrices * (4 + 2) + vectors * 4);
  EXPECT_EQ(plan->optimizer_bytes, (matrices + vectors) * 12);
  // x, qkv, o, both sums, the first norm, up, its activation; logsumexp.
  EXPECT_EQ(plan->activation_bytes,
            12 * int64_t{16384} * (768 * 2 * (1 + 3 + 1 + 2 + 1 + 4 + 4) + 12 * 4));
  EXPECT_EQ(plan->forward_flops, 2.0 * 16384 * matrices);
  EXPECT_EQ(plan->backward_flops, 4.0 * 16384 * matrices);
  EXPECT_EQ(plan->recompute, std::vector<Recompute>(12, Recompute::kNone));
}

TEST(ModulePlan, PointwiseKeepsWhatProductsGive) {
  const ModuleGraph graph = *ModuleGraph::Make(BertLayout(768, 1));
  const std::vector<bool> kept = KeptValues(graph, 0, Recompute::kPointwise);
  // x, qkv, o, the projection, up, down: 11 widths.
  EXPECT_EQ(kept, (std::vector<bool>{1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0}));
}

TEST(ModulePlan, AutoTakesTheLeastThatFits) {
  const ModuleGraph graph = *ModuleGraph::Make(BertLayout(256, 6));
  const WeightTable weights(graph);
  const ModuleLimits limits{.max_rows = 4096, .kept_rows = 8192};
  const int64_t most = MakePlan(graph, weights, kAdamW, limits, kPlenty)->bytes();
  ModuleLimits layers = limits;
  layers.recompute = Recompute::kLayers;
  const int64_t least = MakePlan(graph, weights, kAdamW, layers, kPlenty)->bytes();
  ASSERT_LT(least, most);
  int64_t before = 0;  // how much was computed again at the budget before
  for (int64_t budget = most; budget >= least; budget -= (most - least) / 40) {
    auto plan = MakePlan(graph, weights, kAdamW, limits, budget);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LE(plan->bytes(), budget);
    int64_t sum = 0;
    for (Recompute mode : plan->recompute) sum += static_cast<int64_t>(mode) - 1;
    EXPECT_GE(sum, before);
    // From the first layer on, pointwise in all before whole layers.
    EXPECT_TRUE(std::is_sorted(plan->recompute.rbegin(), plan->recompute.rend()));
    EXPECT_LE(static_cast<int>(plan->recompute.front()) - static_cast<int>(plan->recompute.back()),
              1);
    before = sum;
  }
  EXPECT_EQ(MakePlan(graph, weights, kAdamW, limits, least)->recompute,
            std::vector<Recompute>(6, Recompute::kLayers));
  const absl::Status status = MakePlan(graph, weights, kAdamW, limits, least - 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), absl::StrCat("limits.kept_rows: expected at most 8191, which fit ",
                                           least - 1, " bytes, got 8192 of ", least, " bytes"));
}

TEST(ModulePlan, SaysWhereNoRowsFit) {
  const ModuleGraph graph = *ModuleGraph::Make(BertLayout(256, 6));
  const WeightTable weights(graph);
  for (int64_t kept : {0, 64}) {
    const absl::Status status =
        MakePlan(graph, weights, kAdamW, {.max_rows = 64, .kept_rows = kept}, 1000).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
    EXPECT_TRUE(absl::StartsWith(status.message(),
                                 "limits.max_rows: expected a module of at most 1000 bytes (by "))
        << status;
  }
}

TEST(ModulePlan, RefusesRowsByTheirField) {
  const ModuleGraph graph = *ModuleGraph::Make(BertLayout(64, 1));
  const WeightTable weights(graph);
  const std::pair<ModuleLimits, absl::string_view> cases[] = {
      {{.max_rows = 0}, "limits.max_rows: expected 1..4294967296, got 0"},
      {{.max_rows = kMaxCallRows + 1}, "limits.max_rows: expected 1..4294967296, got 4294967297"},
      {{.max_rows = 8, .kept_rows = 7},
       "limits.kept_rows: expected 0, or max_rows = 8 and more, got 7"},
      {{.max_rows = 8, .kept_rows = kMaxCallRows + 1},
       "limits.kept_rows: expected 0..4294967296, got 4294967297"},
      {{.max_rows = 8, .max_memory_rows = 1}, "limits.max_memory_rows: expected 0..0, got 1"}};
  for (const auto& [limits, message] : cases) {
    EXPECT_EQ(MakePlan(graph, weights, kAdamW, limits, kPlenty).status().message(), message);
  }
}

TEST(ModulePlan, TheLargestLayoutNeitherOverflowsNorTakesLong) {
  ModuleLayout layout{.width = 65536};
  ModuleBlock block;
  for (int n = 0; n < kMaxBlockOps; ++n) {
    const int64_t input = n == 0 ? kInputValue : n + 1;
    block.ops.push_back({ActivationOp{.input = input, .kind = ActivationKind::kTanh}});
  }
  layout.blocks = {block};
  layout.layers.resize(kMaxModuleLayers);
  const ModuleGraph graph = *ModuleGraph::Make(layout);
  const WeightTable weights(graph);
  const ModuleLimits limits{.max_rows = kMaxCallRows, .kept_rows = kMaxCallRows};
  EXPECT_EQ(MakePlan(graph, weights, kAdamW, limits, kPlenty).status().code(),
            absl::StatusCode::kOutOfRange);
}

TEST(ModulePlan, RandomModulesFitWhatTheyAskFor) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const ModuleGraph graph = *ModuleGraph::Make(RandomLayout(random));
    const WeightTable weights(graph);
    const int64_t memory = graph.layout().memory_width > 0 ? 32 : 0;
    ModuleLimits limits{.max_rows = 64,
                        .kept_rows = 128,
                        .max_memory_rows = memory,
                        .kept_memory_rows = 2 * memory};
    int64_t activations = kPlenty;
    for (Recompute mode : {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers}) {
      limits.recompute = mode;
      auto plan = MakePlan(graph, weights, kAdamW, limits, kPlenty);
      ASSERT_TRUE(plan.ok()) << plan.status();
      if (mode != Recompute::kPointwise) {
        EXPECT_LE(plan->activation_bytes, activations);
      }
      activations = std::min(activations, plan->activation_bytes);
      EXPECT_TRUE(MakePlan(graph, weights, kAdamW, limits, plan->bytes()).ok());
      EXPECT_FALSE(MakePlan(graph, weights, kAdamW, limits, plan->bytes() - 1).ok());
    }
  }
}

}  // namespace
}  // namespace attnd
