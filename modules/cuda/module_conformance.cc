#include "modules/cuda/module_conformance.h"

#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "modules/cpu/cpu_module_engine.h"
#include "modules/cpu/engine_comparison.h"
#include "modules/cuda/cuda_module_engine.h"
#include "modules/reference/call_parts.h"
#include "modules/reference/reference_engine.h"

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

constexpr Recompute kModes[] = {Recompute::kNone, Recompute::kPointwise, Recompute::kLayers};

TEST_P(ModuleConformance, KnownLayersAreAsCloseAsRoundingLeavesThem) {
  for (const auto& [name, layout] : KnownLayouts(element_)) {
    ReferenceFixture fixture(layout, 7, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 2, GetParam().length));
    EngineUnderTest engine(*engine_, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone));
    const Results results = engine.Run(fixture.inputs, fixture.dy);
    const auto [rounded, exact] = References(fixture, layout);
    const Comparison one = Compare(results, rounded, exact, element_, BoundOfDevice(element_));
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
    const Comparison one = Compare(of_modes[0], rounded, exact, element_, BoundOfDevice(element_));
    EXPECT_LE(one.most, 2) << "seed " << seed;  // errors grow from op to op
    all.tensors += one.tensors;
    all.close += one.close;
  }
  EXPECT_EQ(supported, GetParam().random_modules);
  EXPECT_GT(moderate, GetParam().random_modules * 3 / 4);
  EXPECT_GE(all.close, 0.95 * all.tensors) << " of " << all.tensors;
}

}  // namespace
}  // namespace attnd
