// An optimizer's steps in two engines, which have to leave the same bits in both.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <vector>

#include "tests/layers/engine_comparison.h"
#include "tests/layers/engine_fixture.h"

namespace attnd {

inline void PutRandomGradient(ReferenceFixture& fixture, size_t tensor,
                              std::initializer_list<EngineUnderTest*> engines) {
  const Bytes gradient = BytesOf(RandomNumbers(fixture.random(), fixture.weights[tensor].size(),
                                               Rounder(Rounding::kElements), ElementType::kFloat32),
                                 ElementType::kFloat32);
  for (EngineUnderTest* engine : engines) {
    CheckOk(engine->instance().Put(tensor, TensorRole::kGradient, ElementType::kFloat32, gradient));
  }
}

// Steps with random gradients. The fixture's weights are those after them.
inline void ExpectSameSteps(ModuleEngine& engine, ModuleEngine& oracle, ReferenceFixture& fixture,
                            const OptimizerSpec& optimizer, int steps) {
  const GroupRates rates[] = {{.learning_rate = 1e-2, .weight_decay = 0.1}};
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  EngineUnderTest tested(engine, fixture, limits, optimizer);
  EngineUnderTest exact(oracle, fixture, limits, optimizer);
  // Memory comes zeroed, whoever had it before.
  for (TensorRole role : {TensorRole::kGradient, TensorRole::kMoment1, TensorRole::kMoment2}) {
    for (const Numbers& tensor : tested.Tensors(role)) EXPECT_EQ(Largest(tensor), 0);
  }
  for (int step = 0; step < steps; ++step) {
    for (size_t n = 0; n < fixture.weights.size(); ++n) {
      PutRandomGradient(fixture, n, {&tested, &exact});
    }
    const StepCall call{.groups = rates, .multiplier = 0.5, .max_norm = 10};
    const StepResult a = Value(tested.instance().Step(call));
    const StepResult b = Value(exact.instance().Step(call));
    EXPECT_TRUE(a.applied && b.applied);
    EXPECT_EQ(a.optimizer_step, step + 1);
    EXPECT_EQ(a.stats.squared_norm, b.stats.squared_norm);
  }
  for (TensorRole role : {TensorRole::kWeight, TensorRole::kGradient, TensorRole::kMoment1,
                          TensorRole::kMoment2, TensorRole::kMoment2Max}) {
    EXPECT_TRUE(SameBits(tested.Tensors(role), exact.Tensors(role))) << static_cast<int>(role);
  }
  // The next forward reads the new weights.
  fixture.weights = tested.Tensors(TensorRole::kWeight);
  EngineUnderTest fresh(engine, fixture, limits, optimizer);
  EXPECT_TRUE(
      tested.Run(fixture.inputs, fixture.dy).HasBitsOf(fresh.Run(fixture.inputs, fixture.dy)));
}

// Steps in which each entry has a count, a multiplier and one of two sets of numbers of its own, or
// stays as it is, gradient or not.
inline void ExpectSameStepsOfEntries(ModuleEngine& engine, ModuleEngine& oracle,
                                     ReferenceFixture& fixture, const OptimizerSpec& optimizer) {
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  EngineUnderTest tested(engine, fixture, limits, optimizer);
  EngineUnderTest exact(oracle, fixture, limits, optimizer);
  OptimizerSpec other = optimizer;
  other.beta1 = 0.5;
  other.momentum = 0;
  other.nesterov = false;
  const StepValues values[] = {{optimizer, {.learning_rate = 1e-2, .weight_decay = 0.1}},
                               {other, {.learning_rate = 1e-3}}};
  const size_t entries = fixture.weights.size();
  std::vector<int64_t> counts(entries, 0);
  for (int step = 0; step < 4; ++step) {
    std::vector<ParameterStep> parameters(entries);
    const std::vector<Numbers> before = tested.Tensors(TensorRole::kWeight);
    for (size_t n = 0; n < entries; ++n) {
      PutRandomGradient(fixture, n, {&tested, &exact});
      if ((n + step) % 3 == 0) continue;
      parameters[n] = {.values = static_cast<uint32_t>(n % 2),
                       .step = ++counts[n],
                       .multiplier = 0.5 * static_cast<double>(n % 4)};
    }
    const StepCall call{.parameters = parameters, .values = values};
    EXPECT_TRUE(Value(tested.instance().Step(call)).applied);
    EXPECT_TRUE(Value(exact.instance().Step(call)).applied);
    const std::vector<Numbers> after = tested.Tensors(TensorRole::kWeight);
    for (size_t n = 0; n < entries; ++n) {
      EXPECT_TRUE(parameters[n].step > 0 || SameBits(after[n], before[n])) << n;
    }
  }
  for (TensorRole role : {TensorRole::kWeight, TensorRole::kGradient, TensorRole::kMoment1,
                          TensorRole::kMoment2, TensorRole::kMoment2Max}) {
    EXPECT_TRUE(SameBits(tested.Tensors(role), exact.Tensors(role))) << static_cast<int>(role);
  }
}

// A gradient with an infinity changes no weight and is cleared.
inline void ExpectSkippedStep(ModuleEngine& engine, ReferenceFixture& fixture) {
  EngineUnderTest tested(engine, fixture, EngineUnderTest::LimitsOf(fixture, Recompute::kNone),
                         AdamW());
  Bytes gradient = BytesOf(Numbers(fixture.weights[0].size(), 1), ElementType::kFloat32);
  StoreElement(ElementType::kFloat32, gradient.data(), 3, INFINITY);
  CheckOk(tested.instance().Put(0, TensorRole::kGradient, ElementType::kFloat32, gradient));
  const GroupRates rates[] = {{.learning_rate = 1e-2}};
  const StepResult result =
      Value(tested.instance().Step({.groups = rates, .skip_unless_finite = true}));
  EXPECT_FALSE(result.applied);
  EXPECT_FALSE(result.stats.is_finite);
  EXPECT_EQ(result.optimizer_step, 0);
  EXPECT_TRUE(SameBits(tested.Tensors(TensorRole::kWeight), fixture.weights));
  EXPECT_EQ(Value(tested.instance().Stats()).squared_norm, 0);
}

}  // namespace attnd
