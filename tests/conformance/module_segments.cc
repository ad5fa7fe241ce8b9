// Segments of the cuda engine of modules: whatever legal ones a block is cut into, the bits are
// those of op by op.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "modules/segments/scheme.h"
#include "modules/segments/segment.h"
#include "tests/conformance/module_conformance.h"
#include "tests/layers/engine_comparison.h"

namespace attnd {
namespace {

using Blocks = std::vector<BlockEnds>;
using FusedResults = ReferenceFixture::Results;

// Forward and backward; and once more y of a forward that keeps nothing, which is the same.
FusedResults RunIn(ModuleEngine& engine, ReferenceFixture& fixture, Recompute mode) {
  EngineUnderTest under_test(engine, fixture, EngineUnderTest::LimitsOf(fixture, mode));
  FusedResults results = under_test.Run(fixture.inputs, fixture.dy);
  const ModuleInputs& inputs = fixture.inputs;
  const ElementType element = fixture.graph().layout().element;
  const Bytes x = BytesOf(inputs.x, element), memory = BytesOf(inputs.memory, element);
  Bytes y(x.size(), std::byte{0xff});
  CheckOk(under_test.instance()
              .Forward({.rows = &inputs.rows,
                        .dropout = inputs.dropout,
                        .x = x,
                        .memory = memory,
                        .mask_bits = inputs.mask_bits,
                        .y = absl::MakeSpan(y)})
              .status());
  EXPECT_TRUE(SameBits(NumbersOf(y, element), results.y));
  return results;
}

FusedResults RunCut(cuda::CudaBackend& attention, ReferenceFixture& fixture, Recompute mode,
                    const Blocks& blocks) {
  const std::unique_ptr<ModuleEngine> engine = MakeCudaModuleEngine(
      attention, {.cut = [&blocks](const ModuleGraph&, const ModuleLimits&) { return blocks; }});
  return RunIn(*engine, fixture, mode);
}

Blocks SingleOpsOf(const ModuleGraph& graph) {
  Blocks blocks;
  for (size_t n = 0; n < graph.layout().blocks.size(); ++n) blocks.push_back(SingleOps(graph, n));
  return blocks;
}

std::vector<SegmentEnds> SchemesOf(const ModuleGraph& graph, Direction direction) {
  return AllSchemes(SegmentMatcher(graph, 0, direction), 1000);
}

SegmentEnds RandomScheme(Random& random, const ModuleGraph& graph, int64_t block,
                         Direction direction) {
  const SegmentMatcher matcher(graph, block, direction);
  SegmentEnds ends;
  for (int64_t first = 0; first < matcher.places(); first = ends.back()) {
    int64_t end = first + 1;
    while (matcher.Match(first, end + 1).ok() && random.Chance(0.8)) ++end;
    ends.push_back(end);
  }
  return ends;
}

// linear → drop → x + it → layer norm → · x's linear → drop → linear → tanh → linear → drop → + the
// sum.
ModuleLayout ChainsOfAll(ElementType element) {
  constexpr int64_t kWidth = 24;
  ModuleLayout layout{.width = kWidth, .element = element};
  ModuleBlock block;
  block.parameters = {{"g", {kWidth}},         {"h", {kWidth}},         {"a", {kWidth, kWidth}},
                      {"b", {kWidth, kWidth}}, {"c", {kWidth, kWidth}}, {"d", {kWidth}},
                      {"e", {kWidth, kWidth}}};
  block.ops = {{LinearOp{.input = 0, .weight = 2}},
               {LinearOp{.input = 0, .weight = 3, .bias = 5}},
               {DropoutOp{2, 26}},
               {BinaryOp{BinaryKind::kAdd, 0, 4, 0.5f}, /*wide=*/true},
               {NormOp{.input = 5, .epsilon = 1e-5f, .weight = 0, .bias = 1}},
               {BinaryOp{BinaryKind::kMultiply, 3, 6, 0.5f}},
               {DropoutOp{7, 26}},
               {LinearOp{.input = 8, .weight = 4}},
               {ActivationOp{9, ActivationKind::kTanh}},
               {LinearOp{.input = 10, .weight = 6}},
               {DropoutOp{11, 100}},
               {BinaryOp{BinaryKind::kAdd, 12, 5}}};
  layout.blocks.push_back(block);
  layout.layers.push_back({});
  return layout;
}

TEST_P(ModuleConformance, EverySchemeOfABlockGivesTheBitsOfSingleOps) {
  ReferenceFixture fixture(ChainsOfAll(element_), 3, Rounding::kElements);
  fixture.SetRows({.batch = 1, .length = 9});
  const ModuleGraph& graph = fixture.graph();
  const FusedResults single = RunCut(*attention_, fixture, Recompute::kNone, SingleOpsOf(graph));
  const std::vector<SegmentEnds> forward = SchemesOf(graph, Direction::kForward);
  const std::vector<SegmentEnds> backward = SchemesOf(graph, Direction::kBackward);
  // Chains of five ops and of two, and a product with tanh.
  ASSERT_EQ(forward.size(), 64u);
  ASSERT_EQ(backward.size(), 64u);
  for (size_t n = 0; n < forward.size(); ++n) {
    const BlockEnds ends = {forward[n], backward[backward.size() - 1 - n]};
    EXPECT_TRUE(single.HasBitsOf(RunCut(*attention_, fixture, Recompute::kNone, {ends}))) << n;
  }
}

TEST_P(ModuleConformance, RandomSchemesGiveTheBitsOfSingleOps) {
  constexpr Recompute kRecomputes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};
  int64_t joined = 0;
  const int modules = 4 + GetParam().random_modules / 4;
  for (int seed = 0; seed < modules; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    ReferenceFixture fixture(RandomLayout(random, {.element = element_}),
                             static_cast<uint64_t>(seed), Rounding::kElements);
    const ModuleGraph& graph = fixture.graph();
    Blocks blocks;
    for (size_t n = 0; n < graph.layout().blocks.size(); ++n) {
      blocks.push_back({RandomScheme(random, graph, n, Direction::kForward),
                        RandomScheme(random, graph, n, Direction::kBackward)});
      const auto ops = static_cast<int64_t>(graph.layout().blocks[n].ops.size());
      joined +=
          2 * ops - static_cast<int64_t>(blocks[n].forward.size() + blocks[n].backward.size());
    }
    const FusedResults single = RunCut(*attention_, fixture, Recompute::kNone, SingleOpsOf(graph));
    EXPECT_TRUE(single.HasBitsOf(RunCut(*attention_, fixture, kRecomputes[seed % 3], blocks)))
        << "seed " << seed;
  }
  EXPECT_GT(joined, modules);
}

TEST_P(ModuleConformance, KnownLayersGiveTheBitsOfSingleOps) {
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    ReferenceFixture fixture(layout, 5, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 1, 5));
    const ModuleGraph& graph = fixture.graph();
    const BlockEnds bound =
        BoundScheme(graph, 0, {fixture.inputs.rows.rows(), 10}, *GpuNamed("h100"));
    EXPECT_LT(bound.forward.size(), graph.layout().blocks[0].ops.size());
    const FusedResults single = RunCut(*attention_, fixture, Recompute::kNone, SingleOpsOf(graph));
    EXPECT_TRUE(single.HasBitsOf(RunCut(*attention_, fixture, Recompute::kPointwise, {bound})))
        << name;
  }
}

// Times that lie lead to any plan. What a search leaves in memory is not seen.
TEST_P(ModuleConformance, SearchesGiveTheBitsOfSingleOpsWhateverTimesSay) {
  const NamedLayout bert = KnownLayouts(element_).front();
  ReferenceFixture fixture(bert.layout, 5, Rounding::kElements);
  fixture.SetRows(KnownRows(bert.layout, 1, 5));
  const auto search = std::make_shared<PlanSearch>(
      "emulated", *GpuNamed("h100"), nullptr, PartSampler::Budget{12, 1e9}, [] { return 0.0; });
  const auto clock = [random = Random(1), now = 0.0](double) mutable {
    return now += random.Chance(0.02) ? 1e9 : random.Uniform();
  };
  const std::unique_ptr<ModuleEngine> engine =
      MakeCudaModuleEngine(*attention_, {.search = search, .clock = clock});
  const FusedResults single =
      RunCut(*attention_, fixture, Recompute::kNone, SingleOpsOf(fixture.graph()));
  EXPECT_TRUE(single.HasBitsOf(RunIn(*engine, fixture, Recompute::kPointwise)));
  EXPECT_GT(engine->Searches().samples, 8);
}

// All that a search can find for products of these columns and depths.
ProductChoices RandomChoices(Random& random) {
  ProductChoices choices;
  for (KernelKind kind : {KernelKind::kProductRowsRows, KernelKind::kProductRowsDepth,
                          KernelKind::kProductDepthDepth}) {
    for (int64_t columns : {24, 32, 48, 96, 136, 144}) {
      for (int64_t other : {24, 32, 48, 96, 136, 144}) {
        ProductChoice& of = choices[{kind, columns, other}];
        if (random.Chance(0.7)) of.small = random.Chance(0.5);
        of.gradient_columns = random.Chance(0.5) ? kWideGradientColumns : kNarrowGradientColumns;
        of.apart = random.Chance(0.5);
      }
    }
  }
  return choices;
}

TEST_P(ModuleConformance, KeptPlansGiveTheBitsOfSingleOps) {
  Random random(3);
  const auto cache = std::make_shared<PlanCache>(
      absl::StrCat(testing::TempDir(), "/kept_plans_", GetParam().name));
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    ReferenceFixture fixture(layout, 5, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 1, 5));
    const ModuleGraph& graph = fixture.graph();
    const auto search = std::make_shared<PlanSearch>("emulated", *GpuNamed("h100"), cache);
    const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
    const BlockEnds ends = {RandomScheme(random, graph, 0, Direction::kForward),
                            RandomScheme(random, graph, 0, Direction::kBackward)};
    CheckOk(cache->Put(search->KeyOf(graph, 0, limits), {ends, RandomChoices(random)}));
    const std::unique_ptr<ModuleEngine> engine =
        MakeCudaModuleEngine(*attention_, {.search = search});
    const FusedResults single = RunCut(*attention_, fixture, Recompute::kNone, SingleOpsOf(graph));
    EXPECT_TRUE(single.HasBitsOf(RunIn(*engine, fixture, Recompute::kNone))) << name;
    EXPECT_EQ(engine->Searches().kept_blocks, 1) << name;
    EXPECT_EQ(engine->Searches().samples, 0) << name;
  }
}

TEST_P(ModuleConformance, RefusesCutsThatAreNotLegal) {
  ReferenceFixture fixture(ChainsOfAll(element_), 3, Rounding::kElements);
  const auto module = std::make_shared<ModuleDescription>(fixture.graph(), OptimizerSpec());
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  const BlockEnds single = SingleOps(fixture.graph(), 0);
  const SegmentEnds with_a_product = {1, 2, 3, 4, 5, 6, 8, 9, 10, 11};
  for (const BlockEnds& ends :
       {BlockEnds{with_a_product, single.backward}, BlockEnds{single.forward, with_a_product},
        BlockEnds{{1, 2, 3}, single.backward}, BlockEnds{}}) {
    const std::unique_ptr<ModuleEngine> engine = MakeCudaModuleEngine(
        *attention_,
        {.cut = [&ends](const ModuleGraph&, const ModuleLimits&) { return Blocks{ends}; }});
    const EnginePlan plan = Value(engine->Plan(*module, limits, int64_t{1} << 40));
    const auto made = engine->Make(module, limits, plan);
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace attnd
