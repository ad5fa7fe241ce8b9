#include "modules/segments/segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/check.h"
#include "modules/kept_values.h"
#include "modules/known_layers.h"
#include "modules/op_uses.h"
#include "modules/segments/scheme.h"
#include "tests/layers/random_module.h"

namespace attnd {
namespace {

constexpr Direction kBothDirections[] = {Direction::kForward, Direction::kBackward};

ModuleGraph GraphOf(ModuleLayout layout) {
  absl::StatusOr<ModuleGraph> graph = ModuleGraph::Make(std::move(layout));
  CHECK(graph.ok()) << graph.status();
  return *std::move(graph);
}
const LayerSizes kSizes{.dropout = 26, .element = ElementType::kFloat16};

// ---- The order of ops.

TEST(OpOrder, PutsACurveBeforeTheProductThatReadsIt) {
  const ModuleGraph llama = GraphOf(LlamaLayers(kSizes));
  const OpOrder order = OrderOf(llama, 0);
  // ... gate 8, silu 9, up 10, product 11 ...
  EXPECT_EQ(order.ops, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13}));
  EXPECT_EQ(order.StepOf(9), order.StepOf(11));
  EXPECT_EQ(order.StepOf(6), order.StepOf(7));  // sum and norm
}

// So that no bit depends on it.
TEST(OpOrder, KeepsTheOrderOfTheReadersOfEachValue) {
  int moved = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    const ModuleGraph graph = GraphOf(RandomLayout(random));
    const std::vector<ModuleOp>& ops = graph.layout().blocks[0].ops;
    const OpOrder order = OrderOf(graph, 0);
    std::vector<int64_t> last_reader(ops.size() + kFirstOpValue, -1);
    std::vector<bool> is_made(ops.size() + kFirstOpValue);
    is_made[kInputValue] = is_made[kMemoryValue] = true;
    for (int64_t op : order.ops) {
      for (const ValueUse& use : ValuesOf(ops[op])) {
        EXPECT_TRUE(is_made[use.value]) << seed;
        EXPECT_LE(last_reader[use.value], op) << seed;
        last_reader[use.value] = op;
      }
      is_made[op + kFirstOpValue] = true;
    }
    EXPECT_EQ(order.ops.back(), static_cast<int64_t>(ops.size()) - 1);
    moved += std::is_sorted(order.ops.begin(), order.ops.end()) ? 0 : 1;
  }
  EXPECT_GT(moved, 5);
}

// ---- Which segments are legal.

ModuleOp CurveOf(int64_t input) { return {ActivationOp{input, ActivationKind::kTanh}}; }

TEST(SegmentMatcher, FindsTheChainsOfAKnownLayer) {
  // 0 q, 1 k, 2 v, 3 attention, 4 out, 5 drop, 6 sum, 7 norm, 8 up, 9 gelu, 10 down, 11 drop,
  // 12 sum, 13 norm
  const ModuleGraph bert = GraphOf(BertLayers(kSizes));
  for (Direction direction : kBothDirections) {
    const SegmentMatcher matcher(bert, 0, direction);
    EXPECT_EQ(matcher.All().size(), 14 + 2 * 3 + 1u);
    const OpSegment rows = *matcher.Match(5, 8);
    EXPECT_EQ(rows.of, SegmentTemplate::kRows);
    // The sum is the norm's input; its gradient lies where that of the dropped branch does.
    EXPECT_EQ(rows.unread, direction == Direction::kForward
                               ? std::vector<int64_t>{5 + kFirstOpValue}
                               : (std::vector<int64_t>{5 + kFirstOpValue, 6 + kFirstOpValue}));
    if (direction == Direction::kForward) {
      EXPECT_EQ(rows.unread_alone, rows.unread);
    }
    EXPECT_EQ(matcher.Match(5, 7)->of, SegmentTemplate::kPointwise);
    EXPECT_EQ(matcher.Match(9, 10)->of, SegmentTemplate::kOp);
  }
}

TEST(SegmentMatcher, JoinsAProductWithItsCurve) {
  // up and gelu; the gradient of gelu's output and gelu's slope.
  const ModuleGraph bert = GraphOf(BertLayers(kSizes));
  const OpSegment up = *SegmentMatcher(bert, 0, Direction::kForward).Match(8, 10);
  EXPECT_EQ(up.of, SegmentTemplate::kProduct);
  EXPECT_TRUE(up.unread.empty());  // the slope reads it
  EXPECT_EQ(up.unread_alone, std::vector<int64_t>{8 + kFirstOpValue});
  const OpSegment down = *SegmentMatcher(bert, 0, Direction::kBackward).Match(9, 11);
  EXPECT_EQ(down.of, SegmentTemplate::kProduct);
  EXPECT_EQ(down.unread, std::vector<int64_t>{9 + kFirstOpValue});
  EXPECT_FALSE(SegmentMatcher(bert, 0, Direction::kForward).Match(9, 11).ok());
  EXPECT_FALSE(SegmentMatcher(bert, 0, Direction::kBackward).Match(8, 10).ok());

  // A linear op, its curve, and what reads that: a product of numbers joins the curve, and x + its
  // curve holds the gradient.
  ModuleLayout layout{.width = 8};
  layout.blocks.push_back({.parameters = {{"w", {8, 8}}, {"v", {8, 8}}},
                           .ops = {{LinearOp{.input = 0, .weight = 0}},
                                   CurveOf(2),
                                   {BinaryOp{BinaryKind::kMultiply, 3, 0}},
                                   {LinearOp{.input = 4, .weight = 1}},
                                   {BinaryOp{BinaryKind::kAdd, 3, 5}}}});
  layout.layers.push_back({});
  const ModuleGraph gated = GraphOf(std::move(layout));
  EXPECT_FALSE(SegmentMatcher(gated, 0, Direction::kForward).Match(0, 2).ok());
}

TEST(SegmentMatcher, KeepsWhatBackwardReads) {
  // ... 9 silu, 10 up, 11 product ...: places 10 and 11 are silu and its product.
  const ModuleGraph llama = GraphOf(LlamaLayers({.element = ElementType::kFloat16}));
  const OpSegment gate = *SegmentMatcher(llama, 0, Direction::kForward).Match(10, 12);
  EXPECT_TRUE(gate.unread.empty());
  EXPECT_EQ(gate.unread_alone, std::vector<int64_t>{9 + kFirstOpValue});
}

ModuleLayout Pointwise(std::vector<ModuleOp> ops) {
  ModuleLayout layout{.width = 8};
  layout.blocks.push_back({.ops = std::move(ops)});
  layout.layers.push_back({});
  return layout;
}

TEST(SegmentMatcher, RefusesWhatIsNoChain) {
  const ModuleGraph bert = GraphOf(BertLayers(kSizes));
  const SegmentMatcher matcher(bert, 0, Direction::kForward);
  const auto refusal = [](const absl::StatusOr<OpSegment>& segment) {
    return std::string(segment.status().message());
  };
  EXPECT_EQ(refusal(matcher.Match(4, 6)), "ops 4 to 6: expected pointwise ops, got linear");
  EXPECT_EQ(refusal(matcher.Match(2, 4)), "ops 2 to 4: expected pointwise ops, got linear");
  EXPECT_EQ(refusal(matcher.Match(3, 6)), "ops 3 to 6: expected pointwise ops, got attention");
  EXPECT_FALSE(matcher.Match(5, 5).ok());
  EXPECT_FALSE(matcher.Match(-1, 2).ok());
  EXPECT_FALSE(matcher.Match(13, 15).ok());

  const NormOp norm{.input = 0, .epsilon = 1e-5f};
  NormOp again = norm;
  again.input = 2;
  const ModuleGraph norms = GraphOf(Pointwise({{norm}, {again}}));
  EXPECT_EQ(refusal(SegmentMatcher(norms, 0, Direction::kForward).Match(0, 2)),
            "ops 0 to 2: expected one norm, got 2");
  // x + tanh(x): x is read twice. tanh(x), tanh(x): no chain.
  const ModuleGraph twice = GraphOf(Pointwise({CurveOf(0), {BinaryOp{BinaryKind::kAdd, 0, 2}}}));
  EXPECT_EQ(refusal(SegmentMatcher(twice, 0, Direction::kForward).Match(0, 2)),
            "ops 0 to 2: expected each value read once, got value 0 twice");
  const ModuleGraph apart =
      GraphOf(Pointwise({CurveOf(0), {DropoutOp{0, 3}}, {BinaryOp{BinaryKind::kAdd, 2, 3}}}));
  EXPECT_FALSE(SegmentMatcher(apart, 0, Direction::kForward).Match(0, 2).ok());

  std::vector<ModuleOp> curves;
  for (int64_t n = 0; n < 10; ++n) curves.push_back(CurveOf(n == 0 ? 0 : n + 1));
  const ModuleGraph chain = GraphOf(Pointwise(curves));
  const SegmentMatcher of_chain(chain, 0, Direction::kForward);
  EXPECT_TRUE(of_chain.Match(1, 9).ok());
  EXPECT_EQ(refusal(of_chain.Match(1, 10)), "ops 1 to 10: expected at most 8 steps, got 9");
}

TEST(SegmentMatcher, WritesWhatOthersRead) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    const ModuleGraph graph = GraphOf(RandomLayout(random));
    const std::vector<ModuleOp>& ops = graph.layout().blocks[0].ops;
    const std::vector<bool> needed = NeededValues(graph, 0);
    const SegmentMatcher matcher(graph, 0, Direction::kForward);
    for (const OpSegment& segment : matcher.All()) {
      for (int64_t value : segment.unread) {
        EXPECT_FALSE(needed[value]) << seed;
        EXPECT_NE(value, static_cast<int64_t>(ops.size()) - 1 + kFirstOpValue) << seed;
      }
      for (int64_t value : segment.unread_alone) {
        for (int64_t place = 0; place < matcher.places(); ++place) {
          if (place >= segment.first && place < segment.end) continue;
          for (const ValueUse& use : ValuesOf(ops[matcher.order().ops[place]])) {
            EXPECT_NE(use.value, value) << seed;
          }
        }
      }
    }
  }
}

TEST(SchemeOf, RefusesCutsThatAreNotLegalOrLeaveOpsOut) {
  const ModuleGraph bert = GraphOf(BertLayers(kSizes));
  const BlockEnds single = SingleOps(bert, 0);
  EXPECT_TRUE(SchemeOf(bert, 0, single).ok());
  for (const SegmentEnds& wrong :
       {SegmentEnds{}, SegmentEnds{14}, SegmentEnds{1, 2, 3}, SegmentEnds{1, 1, 2},
        SegmentEnds{3, 2, 14}, SegmentEnds{1, 2, 3, 4, 5, 8, 9, 10, 11, 14, 15}}) {
    EXPECT_FALSE(SchemeOf(bert, 0, {wrong, single.backward}).ok());
    EXPECT_FALSE(SchemeOf(bert, 0, {single.forward, wrong}).ok());
  }
  const SegmentEnds fused = {1, 2, 3, 4, 5, 8, 9, 10, 11, 14};
  EXPECT_TRUE(SchemeOf(bert, 0, {fused, fused}).ok());
}

// ---- Which are chosen.

// By trying all.
double CheapestOf(int64_t place, int64_t places, const std::vector<CostedSegment>& segments) {
  if (place == places) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (const CostedSegment& segment : segments) {
    if (segment.first != place) continue;
    best = std::min(best, segment.microseconds + CheapestOf(segment.end, places, segments));
  }
  return best;
}

TEST(ShortestScheme, IsTheCheapestOfAll) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int64_t places = random.Between(1, 9);
    std::vector<CostedSegment> segments;
    for (int64_t first = 0; first < places; ++first) {
      for (int64_t end = first + 1; end <= places; ++end) {
        if (end > first + 1 && random.Chance(0.4)) continue;
        segments.push_back({first, end, static_cast<double>(random.Between(0, 20))});
      }
    }
    double cost = 0;
    int64_t first = 0;
    for (int64_t end : ShortestScheme(places, segments)) {
      const auto found = std::find_if(segments.begin(), segments.end(), [&](const auto& segment) {
        return segment.first == first && segment.end == end;
      });
      ASSERT_NE(found, segments.end());
      cost += found->microseconds;
      first = end;
    }
    EXPECT_EQ(first, places);
    EXPECT_EQ(cost, CheapestOf(0, places, segments)) << seed;
  }
}

TEST(ShortestScheme, TakesCostsThatAreNoNumbersForTheWorst) {
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ShortestScheme(2, {{{0, 1, 5}, {1, 2, 5}, {0, 2, nan}}}), (SegmentEnds{1, 2}));
  EXPECT_EQ(ShortestScheme(2, {{{0, 1, 5}, {1, 2, 5}, {0, 2, -1}}}), (SegmentEnds{1, 2}));
  EXPECT_EQ(ShortestScheme(2, {{{0, 1, nan}, {1, 2, infinite}, {0, 2, infinite}}}),
            (SegmentEnds{2}));
  EXPECT_EQ(ShortestScheme(2, {{{0, 1, 1e9}, {1, 2, 0}, {0, 2, 1e9}}}), (SegmentEnds{2}));
}

TEST(BoundScheme, JoinsWhatMovesFewerBytesInFewerLaunches) {
  LayerSizes sizes{.width = 768, .heads = 12, .kv_heads = 12, .inner = 3072, .dropout = 26};
  sizes.element = ElementType::kFloat16;
  const ModuleGraph bert = GraphOf(BertLayers(sizes));
  const RowCounts rows = {.input = 4096};
  const double td = 4096 * 768 * 2.0;
  for (const GpuRates& gpu : KnownGpus()) {
    const BlockEnds ends = BoundScheme(bert, 0, rows, gpu);
    EXPECT_EQ(ends.forward, (SegmentEnds{1, 2, 3, 4, 5, 8, 10, 11, 14}));
    EXPECT_EQ(ends.backward, (SegmentEnds{1, 2, 3, 4, 5, 8, 9, 11, 14}));
  }
  EXPECT_TRUE(JoinsProducts(*GpuNamed("a100"), ElementType::kFloat32));
  EXPECT_FALSE(JoinsProducts(*GpuNamed("v100"), ElementType::kFloat32));
  const auto work = [&](Direction direction, int64_t first, int64_t end) {
    return BlockWork(bert, 0, direction, rows)
        .Of(*SegmentMatcher(bert, 0, direction).Match(first, end));
  };
  // Forward reads the branch and the residual, writes their sum and its norm. Alone the three ops
  // move 2 + 3 + 2.
  EXPECT_EQ(work(Direction::kForward, 5, 8).bytes, 4 * td);
  EXPECT_EQ(work(Direction::kForward, 5, 8).launches, 1);
  EXPECT_EQ(work(Direction::kForward, 6, 7).bytes, 3 * td);
  // Backward reads dy and the sum, writes the gradients of branch and residual, then sums columns
  // over dy and the sum.
  EXPECT_EQ(work(Direction::kBackward, 5, 8).bytes, 6 * td);
  EXPECT_EQ(work(Direction::kBackward, 5, 8).launches, 2);
  const SegmentWork up = work(Direction::kForward, 8, 9);
  EXPECT_EQ(up.flops, 2.0 * 4096 * 768 * 3072);
  EXPECT_EQ(up.bytes, td + 4 * td + 768 * 3072 * 2.0);
  // The curve's output is written beside; its slope's gradient is not, which saves a launch too.
  const double inner = 4 * td;
  EXPECT_EQ(work(Direction::kForward, 8, 10).bytes, up.bytes + inner);
  EXPECT_EQ(work(Direction::kForward, 8, 10).later_bytes, inner);
  EXPECT_EQ(work(Direction::kForward, 8, 10).launches, 1);
  const SegmentWork down = work(Direction::kBackward, 10, 11);
  EXPECT_EQ(work(Direction::kBackward, 9, 11).bytes, down.bytes + inner);
  EXPECT_EQ(work(Direction::kBackward, 9, 11).later_bytes, down.later_bytes + inner);
  EXPECT_EQ(work(Direction::kBackward, 9, 11).launches, down.launches);
  const GpuRates& a100 = *GpuNamed("a100");
  EXPECT_NEAR(up.Microseconds(a100), up.flops / 312e6 + kLaunchMicroseconds, 1e-3);
  // Sums over columns are a launch of their own, behind the products.
  const SegmentWork back = work(Direction::kBackward, 8, 9);
  EXPECT_EQ(back.later_bytes, 4 * td);
  EXPECT_EQ(back.launches, 3);
  EXPECT_NEAR(back.Microseconds(a100),
              back.flops / 312e6 + 4 * td / 1.8e6 + 3 * kLaunchMicroseconds, 1e-3);
  // A V100's products are simulated, as the next test has them: dx, and dW with the bias.
  EXPECT_NEAR(back.Microseconds(*GpuNamed("v100")), 317.1 + 201.4 + 2 * kLaunchMicroseconds, 2);
}

// As the simulator has it: tools/voltasim's table of a layer (`./dev volta-report --layers`).
TEST(SegmentWork, OfAV100HasSimulatedProducts) {
  const GpuRates& v100 = *GpuNamed("v100");
  const auto took = [&](LinearProduct of, int64_t rows, int64_t columns, int64_t depth) {
    return SegmentWork{.products = {{of, rows, columns, depth}}}.Microseconds(v100);
  };
  EXPECT_NEAR(took(LinearProduct::kOutput, 512, 768, 768), 29.3, 0.1);  // 24 blocks
  EXPECT_NEAR(took(LinearProduct::kOutput, 512, 3072, 768), 42.5, 0.1);
  EXPECT_NEAR(took(LinearProduct::kOutput, 16384, 3072, 768), 855.0, 5);
  EXPECT_NEAR(took(LinearProduct::kInputGradient, 16384, 768, 3072), 793.4, 5);
  EXPECT_NEAR(took(LinearProduct::kWeightGradient, 3072, 768, 512), 30.8, 0.2);
  EXPECT_NEAR(took(LinearProduct::kWeightGradient, 768, 768, 4096), 55.9, 0.2);
}

TEST(GpuRates, AreOfTheNewestGpuThatIsNotNewer) {
  EXPECT_STREQ(GpuOfArchitecture("sm_70").name, "v100");
  EXPECT_STREQ(GpuOfArchitecture("sm_86").name, "a100");
  EXPECT_STREQ(GpuOfArchitecture("sm_90").name, "h100");
  EXPECT_STREQ(GpuOfArchitecture("sm_60").name, "v100");
  EXPECT_EQ(GpuNamed("k80"), nullptr);
}

}  // namespace
}  // namespace attnd
