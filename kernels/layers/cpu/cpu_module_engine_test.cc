// The CPU engine of modules against the float64 reference, and what may not change a bit.
#include "kernels/layers/cpu/cpu_module_engine.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>

#include "base/large_buffer.h"
#include "kernels/cpu/cpu_backend.h"
#include "modules/known_layers.h"
#include "modules/reference/call_parts.h"
#include "modules/reference/reference_engine.h"
#include "tests/layers/engine_comparison.h"
#include "tests/layers/engine_fixture.h"
#include "tests/layers/step_comparison.h"

// AddressSanitizer and its like have this; mallinfo2 does not see their heap.
extern "C" size_t __sanitizer_get_current_allocated_bytes() __attribute__((weak));

namespace attnd {
namespace {

using Results = ReferenceFixture::Results;

constexpr ElementType kElements[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                     ElementType::kFloat16};
constexpr Recompute kModes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};

class CpuModuleEngineTest : public testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 2});
  std::unique_ptr<ModuleEngine> engine_ = MakeCpuModuleEngine(2, *backend_);
};

TEST_F(CpuModuleEngineTest, RandomModulesAreAsCloseAsRoundingLeavesThem) {
  for (ElementType element : kElements) {
    Comparison all;
    int moderate = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
      Random random(seed);
      const ModuleLayout layout = RandomLayout(random, {.element = element});
      ReferenceFixture fixture(layout, seed, Rounding::kElements);
      EngineUnderTest engine(*engine_, fixture,
                             EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
      const Results results = engine.Run(fixture.inputs, fixture.dy);
      const auto [rounded, exact] = References(fixture, layout);
      if (!IsModerate(rounded) || !IsModerate(exact)) continue;
      ++moderate;
      const Comparison one = Compare(results, rounded, exact, element);
      EXPECT_LE(one.most, 2)  // errors grow from op to op
          << ElementName(element) << " seed " << seed;
      all.tensors += one.tensors;
      all.close += one.close;
    }
    EXPECT_GT(moderate, 170) << ElementName(element);
    EXPECT_GE(all.close, 0.95 * all.tensors) << ElementName(element) << " of " << all.tensors;
  }
}

TEST_F(CpuModuleEngineTest, KnownLayersAreAsCloseAsRoundingLeavesThem) {
  for (ElementType element : kElements) {
    for (const auto& [name, layout] : KnownLayouts(element)) {
      ReferenceFixture fixture(layout, 7, Rounding::kElements);
      fixture.SetRows(KnownRows(layout, 3, 29));
      EngineUnderTest engine(*engine_, fixture,
                             EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
      const Results results = engine.Run(fixture.inputs, fixture.dy);
      const auto [rounded, exact] = References(fixture, layout);
      const Comparison one = Compare(results, rounded, exact, element);
      EXPECT_EQ(one.close, one.tensors) << name << " " << ElementName(element);
    }
  }
}

TEST_F(CpuModuleEngineTest, ComputingAgainGivesTheBitsThatWereKept) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    ReferenceFixture fixture(RandomLayout(random, {.element = kElements[seed % 3]}), seed,
                             Rounding::kElements);
    std::vector<Results> of_modes;
    for (Recompute mode : kModes) {
      EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, mode));
      of_modes.push_back(engine.Run(fixture.inputs, fixture.dy));
    }
    EXPECT_TRUE(of_modes[0].HasBitsOf(of_modes[1])) << "pointwise, seed " << seed;
    EXPECT_TRUE(of_modes[0].HasBitsOf(of_modes[2])) << "layers, seed " << seed;
  }
}

TEST_F(CpuModuleEngineTest, LayersOneByOneGiveTheBitsOfAllAtOnce) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    ReferenceFixture fixture(RandomLayout(random, {.element = kElements[seed % 3]}), seed,
                             Rounding::kElements);
    ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, kModes[seed / 3 % 3]);
    limits.kept_memory_rows *= fixture.graph().layers();  // each call has its own
    EngineUnderTest engine(*engine_, fixture, limits);
    const Results whole = engine.Run(fixture.inputs, fixture.dy);
    CheckOk(engine.instance().ClearGradients());
    EXPECT_TRUE(whole.HasBitsOf(engine.RunLayers(fixture.inputs, fixture.dy))) << "seed " << seed;
    EXPECT_EQ(engine.instance().KeptRows(), 0);
  }
}

TEST_F(CpuModuleEngineTest, AnyNumberOfThreadsGivesTheSameBits) {
  const std::unique_ptr<Backend> one = MakeCpuBackend({.threads = 1});
  const std::unique_ptr<ModuleEngine> alone = MakeCpuModuleEngine(1, *one);
  const std::unique_ptr<ModuleEngine> many = MakeCpuModuleEngine(5, *backend_);
  for (ElementType element : kElements) {
    for (const auto& [name, layout] : KnownLayouts(element)) {
      ReferenceFixture fixture(layout, 11, Rounding::kElements);
      fixture.SetRows(KnownRows(layout, 5, 83));
      std::vector<Results> results;
      for (ModuleEngine* engine : {alone.get(), many.get()}) {
        EngineUnderTest under_test(*engine, fixture,
                                   EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
        results.push_back(under_test.Run(fixture.inputs, fixture.dy));
      }
      EXPECT_TRUE(results[0].HasBitsOf(results[1])) << name << " " << ElementName(element);
    }
  }
}

TEST_F(CpuModuleEngineTest, SequencesAloneGiveTheBitsThatTheyHaveInABatch) {
  int compared = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    const ModuleLayout layout = RandomLayout(random, {.element = kElements[seed % 3]});
    ReferenceFixture fixture(layout, seed, Rounding::kElements);
    const CallRows& rows = fixture.inputs.rows;
    if (rows.is_packed() || rows.batch == 1 || DependsOnBatch(layout)) continue;
    ++compared;
    EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
    const Results whole = engine.Run(fixture.inputs, fixture.dy);
    Results joined;
    for (int64_t b = 0; b < rows.batch; ++b) {
      const Results one = engine.Run(OneSequence(fixture.inputs, layout, b),
                                     Part(fixture.dy, layout.width, b * rows.length, rows.length));
      Append(one.y, joined.y);
      Append(one.dx, joined.dx);
      Append(one.d_memory, joined.d_memory);
    }
    EXPECT_TRUE(SameBits(whole.y, joined.y)) << "seed " << seed;
    EXPECT_TRUE(SameBits(whole.dx, joined.dx)) << "seed " << seed;
    EXPECT_TRUE(SameBits(whole.d_memory, joined.d_memory)) << "seed " << seed;
  }
  EXPECT_GT(compared, 30);
}

TEST_F(CpuModuleEngineTest, OneCallGivesTheBitsOfItsMicroBatches) {
  for (ElementType element : kElements) {
    for (const auto& [name, layout] : KnownLayouts(element)) {
      if (layout.memory_width > 0) continue;
      ReferenceFixture fixture(layout, 5, Rounding::kElements);
      fixture.SetRows({.batch = 16, .length = 256});
      const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
      EngineUnderTest whole(*engine_, fixture, limits), parts(*engine_, fixture, limits),
          other(*engine_, fixture, limits);
      const Results results = whole.Run(fixture.inputs, fixture.dy);
      EXPECT_TRUE(results.HasBitsOf(InParts(parts, fixture, 4))) << name;
      // Not blocks of 1024 rows: rows are the same, sums are others, or the test could not fail.
      const Results halves = InParts(other, fixture, 8);
      EXPECT_TRUE(SameBits(results.dx, halves.dx)) << name;
      EXPECT_FALSE(SameBits(results.gradients, halves.gradients)) << name;
    }
  }
}

TEST_F(CpuModuleEngineTest, StepsGiveTheReferencesBits) {
  ReferenceEngine reference;
  OptimizerSpec sgd{.kind = OptimizerKind::kSgd, .momentum = 0.9, .nesterov = true};
  OptimizerSpec amsgrad = AdamW();
  amsgrad.amsgrad = true;
  for (const OptimizerSpec& optimizer : {sgd, AdamW(), amsgrad}) {
    ReferenceFixture fixture(BertLayers({.width = 16, .heads = 2, .kv_heads = 2, .inner = 24}), 3,
                             Rounding::kElements);
    ExpectSameSteps(*engine_, reference, fixture, optimizer, 20);
    ExpectSameStepsOfEntries(*engine_, reference, fixture, optimizer);
  }
}

TEST_F(CpuModuleEngineTest, SkipsAStepThatIsNotFiniteAndClearsIt) {
  ReferenceFixture fixture(BertLayers({.width = 16, .heads = 2, .kv_heads = 2, .inner = 24}), 3,
                           Rounding::kElements);
  ExpectSkippedStep(*engine_, fixture);
}

TEST_F(CpuModuleEngineTest, StepsAModuleThatHasNoParameters) {
  ModuleLayout layout{.width = 8};
  layout.blocks.push_back({.ops = {{.kind = ActivationOp{.kind = ActivationKind::kTanh}}}});
  layout.layers.push_back({});
  ReferenceFixture fixture(layout, 3, Rounding::kElements);
  EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone),
                         AdamW());
  engine.Run(fixture.inputs, fixture.dy);
  const GroupRates rates[] = {{.learning_rate = 1e-2}};
  EXPECT_TRUE(Value(engine.instance().Step({.groups = rates})).applied);
}

// Forward of the fixture's call on an instance.
absl::StatusOr<ActivationId> Keep(EngineUnderTest& engine, const ReferenceFixture& fixture,
                                  std::stop_token stop = {}) {
  const ElementType element = fixture.graph().layout().element;
  const Bytes x = BytesOf(fixture.inputs.x, element);
  Bytes y(x.size());
  return engine.instance().Forward({.rows = &fixture.inputs.rows,
                                    .x = x,
                                    .keep = true,
                                    .y = absl::MakeSpan(y),
                                    .stop = std::move(stop)});
}

TEST_F(CpuModuleEngineTest, KeepsAsManyRowsAsItWasMadeFor) {
  ReferenceFixture fixture(GptLayers({.width = 16, .heads = 2, .kv_heads = 2, .inner = 24}), 3,
                           Rounding::kElements);
  fixture.SetRows({.batch = 1, .length = 33});
  ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  limits.kept_rows = 4 * 33;
  EngineUnderTest engine(*engine_, fixture, limits);
  std::vector<ActivationId> kept;
  for (int n = 0; n < 4; ++n) kept.push_back(Value(Keep(engine, fixture)));
  EXPECT_EQ(Keep(engine, fixture).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine.instance().KeptRows(), 4 * 33);
  std::stop_source stopped;
  stopped.request_stop();
  engine.instance().DropActivation(kept[1]);
  EXPECT_EQ(Keep(engine, fixture, stopped.get_token()).status().code(),
            absl::StatusCode::kCancelled);
  const Bytes dy = BytesOf(fixture.dy, ElementType::kFloat32);
  EXPECT_EQ(engine.instance().Backward({.activation = kept[1], .dy = dy}).code(),
            absl::StatusCode::kNotFound);
  EXPECT_NE(Value(Keep(engine, fixture)), kept[1]);
  // An activation stays until it is dropped, and gives the same bits each time.
  Bytes first(dy.size()), second(dy.size());
  for (Bytes* dx : {&first, &second}) {
    CheckOk(engine.instance().Backward(
        {.activation = kept[2], .dy = dy, .add_gradients = false, .dx = absl::MakeSpan(*dx)}));
  }
  EXPECT_EQ(first, second);
  EXPECT_EQ(Value(engine.instance().Stats()).squared_norm, 0);
}

// Calls that are kept, and one that is not, each with a memory input of its own.
TEST_F(CpuModuleEngineTest, KeptCallsHaveTheirOwnMemoryInputs) {
  for (ElementType element : kElements) {
    const LayerSizes sizes{.width = 16, .heads = 2, .kv_heads = 2, .inner = 24, .element = element};
    ReferenceFixture fixture(DecoderLayers(sizes), 3, Rounding::kElements);
    fixture.SetRows({.batch = 2, .length = 9, .memory_length = 5});
    ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
    limits.kept_rows *= 2;
    limits.kept_memory_rows *= 2;
    EngineUnderTest engine(*engine_, fixture, limits);
    const Bytes x = BytesOf(fixture.inputs.x, element), dy = BytesOf(fixture.dy, element);
    Numbers other = fixture.inputs.memory;
    for (double& number : other) number = fixture.random().Normal();
    const Bytes memory[2] = {BytesOf(fixture.inputs.memory, element), BytesOf(other, element)};
    struct OfCall {
      Bytes y, dx, d_memory;
      std::vector<Numbers> gradients;  // of weights: what reads the memory again
      bool operator==(const OfCall&) const = default;
    };
    const auto forward = [&](int call, bool keep, Bytes& y) {
      y.assign(x.size(), std::byte{0xff});
      return Value(engine.instance().Forward({.rows = &fixture.inputs.rows,
                                              .x = x,
                                              .memory = memory[call],
                                              .keep = keep,
                                              .y = absl::MakeSpan(y)}));
    };
    const auto backward = [&](ActivationId kept, OfCall& of) {
      of.dx.resize(x.size());
      of.d_memory.resize(memory[0].size());
      CheckOk(engine.instance().Backward({.activation = kept,
                                          .dy = dy,
                                          .dx = absl::MakeSpan(of.dx),
                                          .d_memory = absl::MakeSpan(of.d_memory)}));
      engine.instance().DropActivation(kept);
      of.gradients = engine.Tensors(TensorRole::kGradient);
      CheckOk(engine.instance().ClearGradients());
    };
    OfCall alone[2], together[2];
    for (int call : {0, 1}) backward(forward(call, true, alone[call].y), alone[call]);
    EXPECT_FALSE(alone[0] == alone[1]);
    ActivationId kept[2];
    for (int call : {0, 1}) kept[call] = forward(call, true, together[call].y);
    Bytes y;
    EXPECT_EQ(forward(0, false, y), 0);
    EXPECT_EQ(y, alone[0].y);
    for (int call : {0, 1}) {
      backward(kept[call], together[call]);
      EXPECT_TRUE(together[call] == alone[call]) << call << " " << ElementName(element);
    }
  }
}

TEST_F(CpuModuleEngineTest, TakesTheMemoryThatItPlansAndNoMoreInCalls) {
  ReferenceFixture fixture(BertLayers({.width = 128, .heads = 2, .kv_heads = 2, .inner = 512}), 3,
                           Rounding::kElements);
  fixture.SetRows({.batch = 4, .length = 256});
  const auto in_use = [] {
    const int64_t mapped = LargeBuffer::MappedBytes();
    if (__sanitizer_get_current_allocated_bytes != nullptr) {
      return mapped + static_cast<int64_t>(__sanitizer_get_current_allocated_bytes());
    }
    const struct mallinfo2 info = mallinfo2();
    return mapped + static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  const GroupRates rates[] = {{.learning_rate = 1e-2}};
  const Bytes dy = BytesOf(fixture.dy, ElementType::kFloat32);
  constexpr int64_t kBookkeeping = int64_t{1} << 18;
  for (Recompute mode : kModes) {
    const int64_t before = in_use();
    EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, mode), AdamW());
    const EnginePlan& plan = engine.instance().plan();
    const int64_t made = in_use() - before;
    EXPECT_GE(made, plan.bytes());
    EXPECT_LE(made, plan.bytes() + kBookkeeping);
    const ActivationId kept = Value(Keep(engine, fixture));
    EXPECT_LE(in_use() - before - made, kBookkeeping);
    CheckOk(engine.instance().Backward({.activation = kept, .dy = dy}));
    EXPECT_TRUE(Value(engine.instance().Step({.groups = rates})).applied);
    EXPECT_LE(in_use() - before - made, kBookkeeping);
    engine.instance().DropActivation(kept);
    const auto small = engine_->Plan(engine.module(), {.max_rows = 1024, .kept_rows = 1024}, 1000);
    EXPECT_EQ(small.status().code(), absl::StatusCode::kOutOfRange);
  }
}

}  // namespace
}  // namespace attnd
