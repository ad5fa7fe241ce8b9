// A module cut into ranges against the same one on one device: for tests.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/layers/engine_comparison.h"
#include "kernels/layers/pipeline/pipeline_engine.h"

namespace attnd {

inline ModuleLayout WithWishes(ModuleLayout layout, const std::vector<int64_t>& devices) {
  for (size_t n = 0; n < layout.layers.size(); ++n) layout.layers[n].device = devices[n];
  return layout;
}

// Where neighbours wish for one device they are one range.
inline size_t RangesOf(const ModuleLayout& layout) {
  size_t ranges = 1;
  for (size_t n = 1; n < layout.layers.size(); ++n) {
    ranges += layout.layers[n].device != layout.layers[n - 1].device;
  }
  return ranges;
}

// Makes the known layers, with dropout: a stack of four each.
inline std::vector<NamedLayout> FourLayers(ElementType element, int64_t width) {
  const LayerSizes sizes{.width = width,
                         .heads = 2,
                         .kv_heads = 2,
                         .inner = 3 * width,
                         .layers = 4,
                         .dropout = 26,
                         .element = element};
  return {{"bert", BertLayers(sizes)},
          {"gpt", GptLayers(sizes)},
          {"llama", LlamaLayers(sizes)},
          {"decoder", DecoderLayers(sizes)}};
}

// Results, gradients over two micro-batches, the norm, and what a clipped step leaves of the
// weights and moments; then the same with the new weights.
inline void ExpectTheBitsOfOneDevice(ModuleEngine& one, ModuleEngine& several,
                                     ReferenceFixture& fixture, Recompute mode,
                                     const std::string& name) {
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, mode);
  OptimizerSpec optimizer = AdamW();
  for (size_t n = 0; n < fixture.weights.size(); ++n) optimizer.groups.push_back(n % 2);
  const GroupRates rates[] = {{.learning_rate = 1e-2, .weight_decay = 0.1},
                              {.learning_rate = 1e-3}};
  EngineUnderTest alone(one, fixture, limits, optimizer);
  EngineUnderTest cut(several, fixture, limits, optimizer);
  ASSERT_TRUE(alone.instance().plan().ranges.empty()) << name;
  const size_t ranges = RangesOf(fixture.graph().layout());
  ASSERT_EQ(cut.instance().plan().ranges.size(), ranges > 1 ? ranges : 0) << name;
  ModuleInputs second = fixture.inputs;
  second.dropout.offset += 1;
  for (int step = 0; step < 2; ++step) {
    for (const ModuleInputs& inputs : {fixture.inputs, second}) {
      const auto expected = alone.Run(inputs, fixture.dy), got = cut.Run(inputs, fixture.dy);
      EXPECT_TRUE(SameBits(got.y, expected.y)) << name;
      EXPECT_TRUE(SameBits(got.dx, expected.dx)) << name;
      EXPECT_TRUE(SameBits(got.d_memory, expected.d_memory)) << name;
      EXPECT_TRUE(SameBits(got.gradients, expected.gradients)) << name;
    }
    const StepCall call{.groups = rates, .multiplier = 0.5, .max_norm = 1e-3};
    const StepResult expected = Value(alone.instance().Step(call));
    const StepResult got = Value(cut.instance().Step(call));
    EXPECT_EQ(got.stats.is_finite, expected.stats.is_finite) << name;
    if (expected.stats.is_finite) {
      EXPECT_EQ(got.stats.squared_norm, expected.stats.squared_norm) << name;
    }
    EXPECT_EQ(got.applied, expected.applied) << name;
    EXPECT_EQ(got.optimizer_step, expected.optimizer_step) << name;
    for (TensorRole role :
         {TensorRole::kWeight, TensorRole::kGradient, TensorRole::kMoment1, TensorRole::kMoment2}) {
      EXPECT_TRUE(SameBits(cut.Tensors(role), alone.Tensors(role)))
          << name << " " << static_cast<int>(role);
    }
  }
}

}  // namespace attnd
