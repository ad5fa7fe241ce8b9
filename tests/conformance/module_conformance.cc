#include "tests/conformance/module_conformance.h"

#include <vector>

#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "modules/reference/call_parts.h"
#include "modules/reference/reference_engine.h"
#include "tests/conformance/naive_backend.h"
#include "tests/layers/engine_comparison.h"
#include "tests/layers/step_comparison.h"

namespace attnd {

using Results = ReferenceFixture::Results;

ModuleConformance::ModuleConformance()
    : element_(GetParam().element),
      attention_(GetParam().make()),
      engine_(MakeCudaModuleEngine(*attention_)) {}
ModuleConformance::~ModuleConformance() = default;

namespace {

// float32 attention multiplies tensor cores' numbers of 11 bits, three products for one: terms to
// 2^-23 where float32's own are to 2^-24, and sums that are truncated.
Bound BoundOfDevice(ElementType element) {
  const Bound bound = BoundOf(element);
  return element == ElementType::kFloat32 ? Bound{4 * bound.factor, 4 * bound.floor_units} : bound;
}

// Attention in plain loops with errors that three products of TF32 may have: o is 2^-22 off, and
// backward's scores are not those of lse, but 2^-21 off.
class TensorFloatBackend : public NaiveBackend {
 public:
  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    RETURN_IF_ERROR(NaiveBackend::Forward(calls).status());
    for (const ForwardCall& call : calls) {
      auto* o = static_cast<float*>(call.o);
      for (int64_t n = 0; n < call.problem->OutputElements(); ++n) o[n] *= 1 + 0x1p-22f;
    }
    return LaunchReport{};
  }
  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    for (BackwardCall call : calls) {
      std::vector<float> lse(call.lse, call.lse + call.problem->LseElements());
      for (float& value : lse) value *= 1 + 0x1p-21f;
      call.lse = lse.data();
      RETURN_IF_ERROR(NaiveBackend::Backward({&call, 1}).status());
    }
    return LaunchReport{};
  }
};

// Where a GPU may round: as the reference does, and besides in 16 bits P and dS before they are
// multiplied, in float32 o and scores. Where softmax's derivative cancels, that is most of the
// error.
std::vector<Results> HonestRuns(ReferenceFixture& fixture, const Results& rounded) {
  const bool is_float = fixture.graph().layout().element == ElementType::kFloat32;
  NaiveBackend rounds_operands(Mistake::kNone, /*rounds_operands=*/true);
  TensorFloatBackend tensor_float;
  Backend& attention = is_float ? static_cast<Backend&>(tensor_float) : rounds_operands;
  const std::unique_ptr<ModuleEngine> engine = MakeCpuModuleEngine(1, attention);
  EngineUnderTest naive(*engine, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
  return {rounded, naive.Run(fixture.inputs, fixture.dy)};
}

constexpr Recompute kModes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};

TEST_P(ModuleConformance, KnownLayersAreAsCloseAsRoundingLeavesThem) {
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    ReferenceFixture fixture(layout, 7, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 2, GetParam().length));
    EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
    const Results results = engine.Run(fixture.inputs, fixture.dy);
    const auto [rounded, exact] = References(fixture, layout);
    const Comparison one =
        Compare(results, HonestRuns(fixture, rounded), exact, element_, BoundOfDevice(element_));
    EXPECT_EQ(one.close, one.tensors) << name;
    EXPECT_LE(one.most, 1) << name;
  }
}

// Odd sizes, masks, key lengths, packed sequences, wide values, every op.
TEST_P(ModuleConformance, RandomModulesAreCloseAndComputeAgainWhatTheyKept) {
  Comparison all;
  int moderate = 0, supported = 0;
  for (int seed = 0; seed < GetParam().random_modules; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const ModuleLayout layout = RandomLayout(random, {.element = element_});
    ReferenceFixture fixture(layout, static_cast<uint64_t>(seed), Rounding::kElements);
    if (!engine_->Supports(fixture.graph()).ok()) continue;
    ++supported;
    std::vector<Results> of_modes;
    for (Recompute mode : {Recompute::kNone, kModes[1 + seed % 2]}) {
      EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, mode));
      of_modes.push_back(engine.Run(fixture.inputs, fixture.dy));
    }
    EXPECT_TRUE(of_modes[0].HasBitsOf(of_modes[1])) << "seed " << seed;
    const auto [rounded, exact] = References(fixture, layout);
    if (!IsModerate(rounded) || !IsModerate(exact)) continue;
    ++moderate;
    const Comparison one = Compare(of_modes[0], HonestRuns(fixture, rounded), exact, element_,
                                   BoundOfDevice(element_));
    EXPECT_LE(one.most, 2) << "seed " << seed;  // errors grow from op to op
    all.tensors += one.tensors;
    all.close += one.close;
  }
  EXPECT_EQ(supported, GetParam().random_modules);
  EXPECT_GT(moderate, GetParam().random_modules * 3 / 4);
  EXPECT_GE(all.close, 0.95 * all.tensors) << " of " << all.tensors;
}

// Norm, linear, both with a bias: what sums gradients over rows.
ModuleLayout NormAndLinear(ElementType element) {
  constexpr int64_t kWidth = 8;
  ModuleLayout layout{.width = kWidth, .element = element};
  ModuleBlock block;
  block.parameters = {{"g", {kWidth}}, {"h", {kWidth}}, {"w", {kWidth, kWidth}}, {"b", {kWidth}}};
  block.ops = {{.kind = NormOp{.epsilon = 1e-5f, .weight = 0, .bias = 1}},
               {.kind = LinearOp{.input = kFirstOpValue, .weight = 2, .bias = 3}}};
  layout.blocks.push_back(block);
  layout.layers.push_back({});
  return layout;
}

TEST_P(ModuleConformance, OneCallGivesTheBitsOfItsMicroBatches) {
  const ModuleLayout layout = NormAndLinear(element_);
  ReferenceFixture fixture(layout, 5, Rounding::kElements);
  fixture.SetRows({.batch = 4, .length = 512});
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  EngineUnderTest whole(*engine_, fixture, limits), parts(*engine_, fixture, limits),
      other(*engine_, fixture, limits);
  const Results results = whole.Run(fixture.inputs, fixture.dy);
  EXPECT_TRUE(results.HasBitsOf(InParts(parts, fixture, 2)));
  // Not blocks of 1024 rows: rows are the same, sums are others, or the test could not fail.
  const Results quarters = InParts(other, fixture, 4);
  EXPECT_TRUE(SameBits(results.dx, quarters.dx));
  EXPECT_FALSE(SameBits(results.gradients, quarters.gradients));
}

TEST_P(ModuleConformance, SequencesAloneGiveTheBitsThatTheyHaveInABatch) {
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    const bool is_decoder = layout.memory_width > 0;
    if (!is_decoder && name != std::string("llama")) continue;
    ReferenceFixture fixture(layout, 9, Rounding::kElements);
    // Sequences of 64 rows run together, short ones in groups.
    fixture.SetRows(KnownRows(layout, 3, is_decoder ? GetParam().length : 64));
    EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
    const Results whole = engine.Run(fixture.inputs, fixture.dy);
    Results joined;
    for (int64_t b = 0; b < fixture.inputs.rows.batch; ++b) {
      const int64_t length = fixture.inputs.rows.length;
      const Results one = engine.Run(OneSequence(fixture.inputs, layout, b),
                                     Part(fixture.dy, layout.width, b * length, length));
      Append(one.y, joined.y);
      Append(one.dx, joined.dx);
      Append(one.d_memory, joined.d_memory);
    }
    EXPECT_TRUE(SameBits(whole.y, joined.y)) << name;
    EXPECT_TRUE(SameBits(whole.dx, joined.dx)) << name;
    EXPECT_TRUE(SameBits(whole.d_memory, joined.d_memory)) << name;
  }
}

// Each sequence a part: 64 rows are as many bytes as tensors are aligned to.
TEST_P(ModuleConformance, PartsOfACallGiveItsBits) {
  const std::unique_ptr<ModuleEngine> cutting =
      MakeCudaModuleEngine(*attention_, {.part_bytes = 1});
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    if (name != std::string("bert") && name != std::string("llama")) continue;
    ReferenceFixture fixture(layout, 11, Rounding::kElements);
    CallRows rows = KnownRows(layout, 3, 64);
    rows.kv_lengths = {64, 5, 40};
    for (int64_t n = 0; n < rows.rows(); ++n) {
      rows.positions.push_back(static_cast<uint32_t>(n % 50));
    }
    rows.first_sequence = 2;
    rows.first_row = 2 * rows.length;
    fixture.SetRows(rows);
    const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
    EngineUnderTest whole(*engine_, fixture, limits), parts(*cutting, fixture, limits);
    const Results expected = whole.Run(fixture.inputs, fixture.dy);
    EXPECT_TRUE(expected.HasBitsOf(parts.Run(fixture.inputs, fixture.dy))) << name;
  }
}

// The first layer of two gives float32.
TEST_P(ModuleConformance, PartsOfACallLeaveYWhereXLay) {
  const std::unique_ptr<ModuleEngine> cutting =
      MakeCudaModuleEngine(*attention_, {.part_bytes = 1});
  ModuleLayout layout = NormAndLinear(element_);
  layout.blocks[0].ops.back().wide = true;
  layout.layers = {{.prefix = "0."}, {.prefix = "1."}};
  ReferenceFixture fixture(layout, 3, Rounding::kElements);
  fixture.SetRows({.batch = 3, .length = 64});
  EngineUnderTest engine(*cutting, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
  const Bytes x = BytesOf(fixture.inputs.x, element_);
  Bytes y(fixture.inputs.x.size() * 4), both = x;
  both.resize(y.size());
  const ModuleForwardCall call{
      .rows = &fixture.inputs.rows, .x = x, .layers = {0, 1}, .y = absl::MakeSpan(y)};
  ModuleForwardCall over = call;
  over.x = absl::MakeConstSpan(both).first(x.size());
  over.y = absl::MakeSpan(both);
  CheckOk(engine.instance().Forward(call).status());
  CheckOk(engine.instance().Forward(over).status());
  EXPECT_TRUE(both == y);
}

TEST_P(ModuleConformance, StepsGiveTheCpuEnginesBits) {
  const std::unique_ptr<Backend> cpu_attention = MakeCpuBackend({.threads = 1});
  const std::unique_ptr<ModuleEngine> cpu_engine = MakeCpuModuleEngine(1, *cpu_attention);
  const OptimizerSpec sgd{.kind = OptimizerKind::kSgd};
  const OptimizerSpec nesterov{.kind = OptimizerKind::kSgd, .momentum = 0.9, .nesterov = true};
  OptimizerSpec adam = AdamW(), amsgrad = AdamW();
  adam.coupled_decay = true;
  amsgrad.amsgrad = true;
  for (const OptimizerSpec& optimizer : {sgd, nesterov, AdamW(), adam, amsgrad}) {
    // 16 · 81 numbers are more than a run of a squared norm; tensors behind 81 are not aligned.
    ReferenceFixture fixture(
        BertLayers({.width = 16, .heads = 2, .kv_heads = 2, .inner = 81, .element = element_}), 3,
        Rounding::kElements);
    fixture.SetRows({.batch = 1, .length = 5});
    ExpectSameSteps(*engine_, *cpu_engine, fixture, optimizer, 3);
    ExpectSameStepsOfEntries(*engine_, *cpu_engine, fixture, optimizer);
  }
}

TEST_P(ModuleConformance, SkipsAStepThatIsNotFiniteAndClearsIt) {
  ReferenceFixture fixture(NormAndLinear(element_), 3, Rounding::kElements);
  ExpectSkippedStep(*engine_, fixture);
}

}  // namespace
}  // namespace attnd
