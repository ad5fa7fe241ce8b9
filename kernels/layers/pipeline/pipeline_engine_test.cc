// Modules cut into ranges of layers: where they lie, and that no bit depends on it.
#include "kernels/layers/pipeline/pipeline_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "kernels/layers/pipeline/layer_placement.h"
#include "kernels/layers/pipeline/pipeline_instance.h"
#include "modules/reference/reference_engine.h"
#include "tests/layers/pipeline_comparison.h"

namespace attnd {
namespace {

constexpr ElementType kElements[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                     ElementType::kFloat16};
constexpr Recompute kModes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};

class NoEngine : public ReferenceEngine {
  absl::Status Supports(const ModuleGraph&) const override {
    return absl::UnimplementedError("none");
  }
  SearchTotals Searches() const override { return {1, 2, 3, 0.5}; }
};

// Named "a0", "b1", ... after their architectures; of '-', what computes nothing.
PipelineEngine EnginesOf(const std::string& architectures) {
  std::vector<PipelineDevice> devices;
  for (size_t n = 0; n < architectures.size(); ++n) {
    const std::string architecture = architectures.substr(n, 1);
    std::unique_ptr<ModuleEngine> engine = std::make_unique<ReferenceEngine>();
    if (architecture == "-") engine = std::make_unique<NoEngine>();
    devices.push_back({absl::StrCat(architecture, n), architecture, std::move(engine)});
  }
  return PipelineEngine(std::move(devices));
}

TEST(PipelineEngine, CountsWhatAllDevicesHaveMeasured) {
  const SearchTotals all = EnginesOf("-a-").Searches();
  EXPECT_EQ(all.kept_blocks, 2);
  EXPECT_EQ(all.searched_blocks, 4);
  EXPECT_EQ(all.samples, 6);
  EXPECT_EQ(all.seconds, 1);
}

// ---- Results.

class PipelineBits : public testing::Test {
 protected:
  PipelineEngine Cpus() {
    std::vector<PipelineDevice> devices;
    for (int n = 0; n < 3; ++n) devices.push_back({"cpu", "", MakeCpuModuleEngine(1, *backend_)});
    return PipelineEngine(std::move(devices));
  }

  const std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 1});
  const std::unique_ptr<ModuleEngine> cpu_ = MakeCpuModuleEngine(1, *backend_);
};

TEST_F(PipelineBits, OfKnownLayersAreThoseOfOneDevice) {
  PipelineEngine cpus = Cpus();
  for (ElementType element : kElements) {
    for (const auto& [name, layout] : FourLayers(element, 24)) {
      for (const std::vector<int64_t>& wishes :
           {std::vector<int64_t>{0, 0, 0, 1}, {2, 0, 0, 1}, {0, 1, 0, 1}}) {
        for (Recompute mode : kModes) {
          ReferenceFixture fixture(WithWishes(layout, wishes), 7, Rounding::kElements);
          fixture.SetRows(KnownRows(layout, 3, 13));
          ExpectTheBitsOfOneDevice(*cpu_, cpus, fixture, mode,
                                   absl::StrCat(name, " ", ElementName(element)));
        }
      }
    }
  }
}

// Wide values, frozen parameters, layers that do not read the memory, packed sequences.
TEST_F(PipelineBits, OfRandomModulesAreThoseOfOneDevice) {
  PipelineEngine cpus = Cpus(), references = EnginesOf("aaa");
  ReferenceEngine reference;
  int cuts = 0, wide = 0, with_memory = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    ModuleLayout layout = RandomLayout(random, {.element = kElements[seed % 3], .max_layers = 4});
    for (ModuleLayer& layer : layout.layers) layer.device = random.Between(0, 2);
    ReferenceFixture fixture(layout, seed, Rounding::kElements);
    const std::string name = absl::StrCat("seed ", seed);
    ExpectTheBitsOfOneDevice(*cpu_, cpus, fixture, kModes[seed / 3 % 3], name);
    ExpectTheBitsOfOneDevice(reference, references, fixture, kModes[seed / 3 % 3], name);
    cuts += RangesOf(layout) > 1;
    with_memory += RangesOf(layout) > 1 && layout.memory_width > 0;
    for (size_t n = 1; n < layout.layers.size(); ++n) {
      const bool is_cut = layout.layers[n].device != layout.layers[n - 1].device;
      const ModuleGraph& graph = fixture.graph();
      wide += is_cut && graph.InputIsWide(n) && graph.x_element() != layout.wide_element;
    }
  }
  EXPECT_GT(cuts, 60);
  EXPECT_GT(wide, 5);
  EXPECT_GT(with_memory, 15);
}

TEST_F(PipelineBits, LayersOneByOneGiveThemToo) {
  PipelineEngine cpus = Cpus();
  for (ElementType element : kElements) {
    for (const auto& [name, layout] : FourLayers(element, 24)) {
      ReferenceFixture fixture(WithWishes(layout, {0, 1, 1, 2}), 7, Rounding::kElements);
      fixture.SetRows(KnownRows(layout, 3, 13));
      ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
      limits.kept_memory_rows *= 4;  // each call has its own
      EngineUnderTest alone(*cpu_, fixture, limits), cut(cpus, fixture, limits);
      const auto expected = alone.Run(fixture.inputs, fixture.dy);
      const auto got = cut.RunLayers(fixture.inputs, fixture.dy);
      EXPECT_TRUE(expected.HasBitsOf(got)) << name << " " << ElementName(element);
      EXPECT_EQ(cut.instance().KeptRows(), 0);
    }
  }
}

TEST_F(PipelineBits, AStoppedBackwardAddsNothing) {
  PipelineEngine cpus = Cpus();
  ReferenceFixture fixture(WithWishes(FourLayers(ElementType::kFloat32, 8)[0].layout, {0, 1, 1, 2}),
                           7, Rounding::kElements);
  fixture.SetRows({.batch = 1, .length = 5});
  EngineUnderTest cut(cpus, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
  const Bytes x = BytesOf(fixture.inputs.x, ElementType::kFloat32);
  Bytes y(x.size());
  const ActivationId kept = Value(cut.instance().Forward(
      {.rows = &fixture.inputs.rows, .x = x, .keep = true, .y = absl::MakeSpan(y)}));
  std::stop_source stopped;
  stopped.request_stop();
  EXPECT_EQ(
      cut.instance().Backward({.activation = kept, .dy = x, .stop = stopped.get_token()}).code(),
      absl::StatusCode::kCancelled);
  EXPECT_EQ(Value(cut.instance().Stats()).squared_norm, 0);
  CheckOk(cut.instance().Backward({.activation = kept, .dy = x, .add_gradients = false}));
  EXPECT_EQ(Value(cut.instance().Stats()).squared_norm, 0);
  EXPECT_EQ(cut.instance().KeptRows(), 5);
  cut.instance().DropActivation(kept);
  EXPECT_EQ(cut.instance().KeptRows(), 0);
  EXPECT_EQ(cut.instance().Backward({.activation = kept, .dy = x}).code(),
            absl::StatusCode::kNotFound);
}

TEST_F(PipelineBits, AForwardThatFailsInTheMiddleKeepsNothing) {
  const auto module = std::make_shared<const ModuleDescription>(
      ReferenceFixture(FourLayers(ElementType::kFloat32, 8)[0].layout, 7, Rounding::kElements)
          .graph(),
      OptimizerSpec());
  ModuleLimits limits{.max_rows = 5, .kept_rows = 10};
  std::vector<std::unique_ptr<ModuleInstance>> ranges;
  for (int64_t first : {0, 2}) {
    const auto slice = SliceOf(*module, first, first + 2);
    const EnginePlan plan = Value(cpu_->Plan(*slice, limits, int64_t{1} << 30));
    ranges.push_back(Value(cpu_->Make(slice, limits, plan)));
    limits.kept_rows = 5;  // of the second
  }
  PipelineInstance cut(module, {}, std::move(ranges), Value(LargeBuffer::Make(5 * 8 * 4)));
  const CallRows rows{.batch = 1, .length = 5};
  const Bytes x(5 * 8 * 4);
  Bytes y(x.size());
  const ModuleForwardCall call{.rows = &rows, .x = x, .keep = true, .y = absl::MakeSpan(y)};
  const ActivationId kept = Value(cut.Forward(call));
  EXPECT_EQ(cut.Forward(call).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(cut.KeptRows(), 5);
  CheckOk(cut.Backward({.activation = kept, .dy = x}));
}

// ---- Placement.

class Placement : public testing::Test {
 protected:
  static ModuleDescription Eight(const std::vector<int64_t>& wishes = {}) {
    ModuleLayout layout =
        BertLayers({.width = 16, .heads = 2, .kv_heads = 2, .inner = 32, .layers = 8});
    for (size_t n = 0; n < wishes.size(); ++n) {
      if (wishes[n] >= 0) layout.layers[n].device = wishes[n];
    }
    return {Value(ModuleGraph::Make(std::move(layout))), AdamW()};
  }
  // Counts the bytes of `count` of its layers, on one device.
  int64_t BytesOfLayers(int64_t count, std::optional<Recompute> recompute) const {
    ModuleLimits limits = limits_;
    limits.recompute = recompute;
    return Value(ReferenceEngine().Plan(*SliceOf(module_, 0, count), limits, kPlenty)).bytes();
  }
  int64_t Border() const { return BorderBytes(module_.graph, limits_); }

  static void ExpectWithin(const EnginePlan& plan, const MemoryBudget& budget) {
    MemoryBudget left = budget;
    for (const EnginePlan& part : plan.parts()) left.devices[part.device] -= part.bytes();
    for (int64_t bytes : left.devices) EXPECT_GE(bytes, 0);
    EXPECT_LE(plan.bytes(), budget.bytes);
  }
  // "0:3 2:5": device and number of layers of each range.
  static std::string Text(const absl::StatusOr<EnginePlan>& plan) {
    if (!plan.ok()) return std::string(absl::StatusCodeToString(plan.status().code()));
    std::string text;
    for (const EnginePlan& part : plan->parts()) {
      absl::StrAppend(&text, text.empty() ? "" : " ", part.device, ":", part.plan.recompute.size());
    }
    return text;
  }

  static constexpr int64_t kPlenty = int64_t{1} << 40;
  const ModuleDescription module_ = Eight();
  const ModuleLimits limits_{.max_rows = 64, .kept_rows = 64};
};

TEST_F(Placement, IsTheDeviceWithTheMostRoom) {
  EXPECT_EQ(Text(EnginesOf("aaa").Plan(module_, limits_, {kPlenty, {1 << 20, 1 << 26, 1 << 25}})),
            "1:8");
  EXPECT_EQ(Text(EnginesOf("aaa").Plan(module_, limits_, kPlenty)), "0:8");
  EXPECT_EQ(Text(EnginesOf("a-a").Plan(module_, limits_, {kPlenty, {1 << 20, 1 << 26, 1 << 25}})),
            "2:8");
  EXPECT_EQ(Text(EnginesOf("--").Plan(module_, limits_, kPlenty)), "UNIMPLEMENTED");
}

TEST_F(Placement, IsOneDeviceEvenWhereItsLayersComputeAgain) {
  const int64_t least = BytesOfLayers(8, Recompute::kLayers);
  const PipelineEngine engine = EnginesOf("aa");
  const EnginePlan plan = Value(engine.Plan(module_, limits_, {kPlenty, {least, least}}));
  EXPECT_EQ(Text(plan), "0:8");
  EXPECT_EQ(plan.plan.recompute, std::vector(8, Recompute::kLayers));
  const EnginePlan cut = Value(engine.Plan(module_, limits_, {kPlenty, {least - 1, least - 1}}));
  EXPECT_EQ(cut.ranges.size(), 2);
  EXPECT_EQ(cut.plan.recompute, std::vector(8, Recompute::kNone));
}

TEST_F(Placement, IsTheFewestDevicesInProportionToTheirRoom) {
  const int64_t of_six = BytesOfLayers(6, Recompute::kNone);
  const int64_t of_two = BytesOfLayers(2, Recompute::kNone);
  const int64_t of_four = BytesOfLayers(4, Recompute::kLayers);
  ModuleLimits limits = limits_;
  limits.recompute = Recompute::kNone;
  for (const auto& [devices, text] : {std::pair{std::vector{of_six, of_six, of_six}, "0:4 1:4"},
                                      {std::vector{of_two, of_six, of_six}, "1:4 2:4"},
                                      {std::vector{of_six, of_two, of_two}, "0:6 1:2"}}) {
    const MemoryBudget budget(kPlenty, devices);
    const EnginePlan plan = Value(EnginesOf("aaa").Plan(module_, limits, budget));
    EXPECT_EQ(Text(plan), text);
    ExpectWithin(plan, budget);
  }
  const MemoryBudget least(kPlenty, std::vector(3, of_four));
  const EnginePlan plan = Value(EnginesOf("aaa").Plan(module_, limits_, least));
  EXPECT_EQ(plan.ranges.size(), 2);
  ExpectWithin(plan, least);
}

TEST_F(Placement, SumsItsRanges) {
  const EnginePlan plan = Value(EnginesOf("aa").Plan(Eight({0, 0, 0, 1}), limits_, kPlenty));
  ASSERT_EQ(plan.ranges.size(), 2);
  EXPECT_EQ(plan.bytes(), plan.ranges[0].bytes() + plan.ranges[1].bytes() + Border());
  EXPECT_EQ(plan.plan.recompute.size(), 8);
  const ModulePlan whole = Value(ReferenceEngine().Plan(module_, limits_, kPlenty)).plan;
  EXPECT_EQ(plan.plan.weight_bytes, whole.weight_bytes);
  EXPECT_EQ(plan.plan.optimizer_bytes, whole.optimizer_bytes);
  EXPECT_EQ(plan.plan.activation_bytes, whole.activation_bytes);
  EXPECT_EQ(plan.plan.forward_flops, whole.forward_flops);
}

TEST_F(Placement, CountsTheBorderToo) {
  ModuleLimits limits = limits_;
  limits.recompute = Recompute::kNone;
  const int64_t half = BytesOfLayers(4, Recompute::kNone);
  const PipelineEngine engine = EnginesOf("aa");
  const MemoryBudget enough(2 * half + Border(), {half, half});
  EXPECT_EQ(Text(engine.Plan(module_, limits, enough)), "0:4 1:4");
  const absl::Status status =
      engine.Plan(module_, limits, {enough.bytes - 1, {half, half}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("a1 has ", half, " bytes")))
      << status.message();
}

TEST_F(Placement, IsAsLayersWishIfItFitsSo) {
  const PipelineEngine engine = EnginesOf("aaa");
  const auto text = [&](const std::vector<int64_t>& wishes, const MemoryBudget& budget) {
    return Text(engine.Plan(Eight(wishes), limits_, budget));
  };
  EXPECT_EQ(text({2, 2, 2, 0, 0, 1, 1, 1}, kPlenty), "2:3 0:2 1:3");
  EXPECT_EQ(text({-1, 1, -1, 0, -1, 7}, kPlenty), "1:3 0:5");
  EXPECT_EQ(text({2}, kPlenty), "2:8");
  EXPECT_EQ(text({7}, kPlenty), "0:8");
  // Each range leaves those behind it what they need, on its own device and of the whole.
  const int64_t least = BytesOfLayers(4, Recompute::kLayers);
  const int64_t two = BytesOfLayers(2, Recompute::kLayers);
  EXPECT_EQ(text({0, 0, 0, 0, 1}, {2 * least + Border(), {kPlenty, kPlenty, 0}}), "0:4 1:4");
  EXPECT_EQ(text({0, 0, 1, 1, 1, 1, 0, 0}, {kPlenty, {2 * two, least, 0}}), "0:2 1:4 0:2");
  EXPECT_EQ(text({0, 0, 1, 1, 1, 1, 0, 0}, {kPlenty, {2 * two - 1, least, kPlenty}}), "2:8");
}

TEST_F(Placement, IsOnDevicesOfOneArchitecture) {
  ModuleLimits limits = limits_;
  limits.recompute = Recompute::kNone;
  const MemoryBudget budget(kPlenty, std::vector(3, BytesOfLayers(5, Recompute::kNone)));
  EXPECT_EQ(Text(EnginesOf("aba").Plan(module_, limits, budget)), "0:4 2:4");
  EXPECT_EQ(Text(EnginesOf("abb").Plan(module_, limits, budget)), "1:4 2:4");
  EXPECT_EQ(Text(EnginesOf("abc").Plan(module_, limits, budget)), "OUT_OF_RANGE");
  EXPECT_EQ(Text(EnginesOf("aba").Plan(Eight({0, 0, 0, 0, 1}), limits_, kPlenty)), "0:8");
}

TEST_F(Placement, SaysWhatIsWrongWithTheLimits) {
  EXPECT_EQ(Text(EnginesOf("aa").Plan(Eight({0, 0, 1}), {.max_rows = 0}, kPlenty)),
            "INVALID_ARGUMENT");
}

}  // namespace
}  // namespace attnd
