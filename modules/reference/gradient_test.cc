// Backward is the derivative of forward: fourth-order finite differences of Σ dy·y along every
// number of x, the memory and the parameters, of each op alone and of random layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/layers/reference_fixture.h"

namespace attnd {
namespace {

constexpr double kStep = 0x1p-13;

double Loss(const ReferenceFixture& fixture) {
  const Numbers y = fixture.Forward();
  double loss = 0;
  for (size_t n = 0; n < y.size(); ++n) loss += fixture.dy[n] * y[n];
  return loss;
}

double Slope(const ReferenceFixture& fixture, double& value) {
  const double original = value;
  const auto at = [&](int steps) {
    value = original + steps * kStep;
    return Loss(fixture);
  };
  const double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
  value = original;
  return slope;
}

// At most `most` numbers of a tensor, spread over it.
void ExpectSlopes(const std::string& name, const ReferenceFixture& fixture, Numbers& values,
                  const Numbers& gradient, int64_t most = 24) {
  ASSERT_EQ(values.size(), gradient.size()) << name;
  const size_t step = std::max<size_t>(1, values.size() / most);
  const double noise = 1e-11 * std::fabs(Loss(fixture));  // of differences of large losses
  for (size_t n = 0; n < values.size(); n += step) {
    const double slope = Slope(fixture, values[n]);
    ASSERT_NEAR(gradient[n], slope, 2e-6 * (1 + std::fabs(slope)) + noise)
        << name << "[" << n << "]";
  }
}

void ExpectGradientsAreSlopes(ReferenceFixture& fixture) {
  const ReferenceFixture::Results results = fixture.Run();
  ExpectSlopes("x", fixture, fixture.inputs.x, results.dx);
  ExpectSlopes("memory", fixture, fixture.inputs.memory, results.d_memory);
  for (size_t n = 0; n < fixture.weights.size(); ++n) {
    const WeightEntry& entry = fixture.table().entries()[n];
    if (!entry.trained_offset.has_value()) {
      EXPECT_TRUE(results.gradients[n].empty()) << entry.name;
      continue;
    }
    ExpectSlopes(entry.name, fixture, fixture.weights[n], results.gradients[n]);
  }
}

// relu has no slope at 0, where differences would straddle it.
void WithoutRelu(ModuleLayout& layout) {
  for (ModuleBlock& block : layout.blocks) {
    for (ModuleOp& op : block.ops) {
      auto* activation = std::get_if<ActivationOp>(&op.kind);
      if (activation != nullptr && activation->kind == ActivationKind::kRelu) {
        activation->kind = ActivationKind::kGelu;
      }
    }
  }
}

TEST(ModuleGradient, IsTheSlopeInRandomLayouts) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    ModuleLayout layout = RandomLayout(random, {.max_layers = 2});
    WithoutRelu(layout);
    ReferenceFixture fixture(std::move(layout), seed, Rounding::kExact);
    ExpectGradientsAreSlopes(fixture);
    if (HasFatalFailure()) return;
  }
}

// Each op alone, between x and a layer whose output is its own.
ModuleLayout OneOp(ModuleOp op, std::vector<ModuleParameter> parameters) {
  ModuleLayout layout{.width = 8};
  layout.blocks = {{.parameters = std::move(parameters), .ops = {std::move(op)}}};
  layout.layers = {{.prefix = "0."}, {.prefix = "1."}};
  return layout;
}

TEST(ModuleGradient, IsTheSlopeOfEachOpAlone) {
  std::vector<std::pair<std::string, ModuleLayout>> cases;
  for (bool transposed : {false, true}) {
    cases.emplace_back("linear",
                       OneOp({LinearOp{0, 0, 1, transposed}}, {{"w", {8, 8}}, {"b", {8}}}));
  }
  for (NormKind kind : {NormKind::kLayer, NormKind::kRms}) {
    NormOp norm{.input = 0, .kind = kind, .epsilon = 1e-3f, .weight = 0, .weight_offset = 1};
    std::vector<ModuleParameter> parameters = {{"w", {8}}};
    if (kind == NormKind::kLayer) {
      norm.bias = 1;
      parameters.push_back({"b", {8}});
    }
    cases.emplace_back("norm", OneOp({norm}, parameters));
  }
  for (int kind = 2; kind <= 6; ++kind) {
    cases.emplace_back("activation",
                       OneOp({ActivationOp{0, static_cast<ActivationKind>(kind)}}, {}));
  }
  cases.emplace_back("add", OneOp({BinaryOp{BinaryKind::kAdd, 0, 0, 0.5f}}, {}));
  cases.emplace_back("multiply", OneOp({BinaryOp{BinaryKind::kMultiply, 0, 0, 0.5f}}, {}));
  cases.emplace_back("dropout", OneOp({DropoutOp{0, 77}}, {}));
  AttentionOp attention{.q = {0, 0, 2, 4}, .k = {0, 0, 1, 4}, .v = {0, 4, 1, 4}};
  attention.rotary = Rotary{.inverse_frequency = {1, 0.3f}, .attention_factor = 1.1f};
  attention.q_norm = 0;
  attention.k_norm = 1;
  attention.qk_norm_epsilon = 1e-3f;
  attention.options.dropout.threshold = 50;
  cases.emplace_back("attention", OneOp({attention}, {{"q", {4}}, {"k", {4}}}));
  for (auto& [name, layout] : cases) {
    SCOPED_TRACE(name);
    ReferenceFixture fixture(std::move(layout), 5, Rounding::kExact);
    ExpectGradientsAreSlopes(fixture);
    if (HasFatalFailure()) return;
  }
}

TEST(ModuleGradient, ReluPassesWhereItsInputIsPositive) {
  ReferenceFixture fixture(OneOp({ActivationOp{0, ActivationKind::kRelu}}, {}), 1,
                           Rounding::kExact);
  const ReferenceFixture::Results results = fixture.Run();
  for (size_t n = 0; n < fixture.inputs.x.size(); ++n) {
    EXPECT_EQ(results.dx[n], fixture.inputs.x[n] > 0 ? fixture.dy[n] : 0);
  }
}

}  // namespace
}  // namespace attnd
