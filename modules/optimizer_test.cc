#include "modules/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention/random_problem.h"

namespace attnd {
namespace {

// One number under an optimizer: the published formulas in long double, from a float32 state.
struct State {
  float parameter = 0, first = 0, second = 0, second_max = 0;
};
struct Exact {
  long double parameter, first, second;
};

Exact ExactStep(const OptimizerSpec& spec, const GroupRates& rates, int64_t t, double multiplier,
                float gradient, const State& s) {
  const long double lr = rates.learning_rate, decay = rates.weight_decay;
  long double p = s.parameter, g = static_cast<long double>(multiplier) * gradient;
  if (spec.kind == OptimizerKind::kSgd) {
    g += decay * p;
    if (spec.momentum == 0) return {p - lr * g, 0, 0};
    const long double b = t == 1 ? g : spec.momentum * s.first + (1 - spec.dampening) * g;
    return {p - lr * (spec.nesterov ? g + spec.momentum * b : b), b, 0};
  }
  if (spec.coupled_decay) g += decay * p;
  if (!spec.coupled_decay) p *= 1 - lr * decay;
  const long double m = spec.beta1 * static_cast<long double>(s.first) + (1 - spec.beta1) * g;
  const long double v = spec.beta2 * static_cast<long double>(s.second) + (1 - spec.beta2) * g * g;
  const long double w = spec.amsgrad ? std::max<long double>(s.second_max, v) : v;
  const long double m_hat = m / (1 - std::pow(static_cast<long double>(spec.beta1), t));
  const long double w_hat = w / (1 - std::pow(static_cast<long double>(spec.beta2), t));
  return {p - lr * m_hat / (std::sqrt(w_hat) + spec.epsilon), m, v};
}

// Units in the last place of a float32 of that size.
double Ulps(long double error, double size) {
  const float f = static_cast<float>(std::fabs(size));
  const double unit = std::nextafter(f, std::numeric_limits<float>::infinity()) - f;
  return static_cast<double>(std::fabs(error)) / unit;
}

std::vector<OptimizerSpec> EveryOptimizer() {
  const OptimizerSpec adam{
      .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  OptimizerSpec coupled = adam, amsgrad = adam;
  coupled.coupled_decay = true;
  amsgrad.amsgrad = true;
  return {{.kind = OptimizerKind::kSgd},
          {.kind = OptimizerKind::kSgd, .momentum = 0.9},
          {.kind = OptimizerKind::kSgd, .momentum = 0.9, .dampening = 0.25},
          {.kind = OptimizerKind::kSgd, .momentum = 0.9, .nesterov = true},
          adam,
          coupled,
          amsgrad};
}

void Apply(const OptimizerSpec& spec, const StepScalars& scalars, float gradient, State& s) {
  ApplyStep(spec, scalars, {&gradient, 1}, absl::MakeSpan(&s.parameter, 1),
            {absl::MakeSpan(&s.first, 1), absl::MakeSpan(&s.second, 1),
             absl::MakeSpan(&s.second_max, 1)});
}

TEST(Optimizer, StaysWithinTwoUnitsOfTheFormulasInEachOf1000Steps) {
  const GroupRates rates{.learning_rate = 1e-3, .weight_decay = 0.01};
  for (const OptimizerSpec& spec : EveryOptimizer()) {
    Random random(7);
    for (int number = 0; number < 8; ++number) {
      State s{.parameter = static_cast<float>(random.Normal())};
      for (int64_t t = 1; t <= 1000; ++t) {
        const float gradient = static_cast<float>(1024 * random.Normal());
        const State before = s;
        const Exact exact = ExactStep(spec, rates, t, 1.0 / 1024, gradient, before);
        Apply(spec, ScalarsOf(spec, rates, t, 1.0 / 1024), gradient, s);
        // The change has roundings of its own, which count where the parameter is as small as it.
        const double change = std::fabs(double{s.parameter} - before.parameter);
        const double size = std::max(std::fabs(double{before.parameter}), 2 * change);
        ASSERT_LE(Ulps(s.parameter - exact.parameter, size), 2) << "step " << t;
        if (spec.MomentCount() < 1) continue;
        const double first = std::max({std::fabs(double{before.first}), std::fabs(double{s.first}),
                                       std::fabs(double{gradient}) / 1024});
        ASSERT_LE(Ulps(s.first - exact.first, first), 2) << "step " << t;
        ASSERT_LE(Ulps(s.second - exact.second, s.second), 4) << "step " << t;
      }
    }
  }
}

TEST(Optimizer, FirstStepOfAdamMovesByTheRate) {
  const OptimizerSpec spec{
      .kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-12};
  State s{.parameter = 1};
  Apply(spec, ScalarsOf(spec, {.learning_rate = 0.125}, 1, 1), 5, s);
  EXPECT_FLOAT_EQ(s.parameter, 0.875f);
}

// As torch does: no decay is not 0 times a parameter, and AMSGrad keeps a NaN.
TEST(Optimizer, WhatIsNotFiniteStaysAsInTorch) {
  State infinite{.parameter = INFINITY};
  Apply({.kind = OptimizerKind::kSgd}, ScalarsOf({}, {.learning_rate = 0.5}, 1, 1), 1, infinite);
  EXPECT_EQ(infinite.parameter, INFINITY);
  const OptimizerSpec amsgrad = EveryOptimizer()[6];
  State s{.parameter = 1};
  Apply(amsgrad, ScalarsOf(amsgrad, {.learning_rate = 0.5}, 1, 1), NAN, s);
  EXPECT_TRUE(std::isnan(s.second_max));
  s.second = 1;
  Apply(amsgrad, ScalarsOf(amsgrad, {.learning_rate = 0.5}, 2, 1), 1, s);
  EXPECT_TRUE(std::isnan(s.second_max));
}

TEST(Optimizer, MomentsAreCounted) {
  std::vector<int64_t> counts;
  for (const OptimizerSpec& spec : EveryOptimizer()) counts.push_back(spec.MomentCount());
  EXPECT_EQ(counts, (std::vector<int64_t>{0, 1, 1, 1, 2, 2, 3}));
}

TEST(Optimizer, ClipsAsTorchDoes) {
  EXPECT_EQ(ClipFactor(100, 1, 0), 1);
  EXPECT_EQ(ClipFactor(100, 1, 20), 1);
  EXPECT_DOUBLE_EQ(ClipFactor(100, 1, 5), 5 / (10 + 1e-6));
  EXPECT_DOUBLE_EQ(ClipFactor(100, 0.5, 1), 1 / (5 + 1e-6));
}

TEST(Optimizer, SquaredNormAddsRunsOf1024) {
  std::vector<float> gradient(5000);
  Random random(1);
  for (float& g : gradient) g = static_cast<float>(random.Normal() * 1e3);
  double sum = 0;
  for (int begin = 0; begin < 5000; begin += 1024) {
    double run = 0;
    for (int n = begin; n < std::min(5000, begin + 1024); ++n)
      run += double{gradient[n]} * gradient[n];
    sum += run;
  }
  EXPECT_EQ(SquaredNorm(gradient), sum);
  EXPECT_EQ(SquaredNorm({}), 0);
  gradient[4000] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(SquaredNorm(gradient)));
}

TEST(Optimizer, RefusesWhatHasNoMeaningByItsField) {
  ModuleLayout layout{.width = 8};
  layout.blocks = {{.parameters = {{"w", {8, 8}}}, .ops = {{LinearOp{.input = 0, .weight = 0}}}}};
  layout.layers = {{.prefix = "0."}};
  const ModuleGraph graph = *ModuleGraph::Make(layout);
  const WeightTable weights(graph);
  layout.parameter_element = ElementType::kFloat16;
  const ModuleGraph half = *ModuleGraph::Make(layout);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const OptimizerKind sgd = OptimizerKind::kSgd, adam = OptimizerKind::kAdamW;
  const std::pair<OptimizerSpec, absl::string_view> cases[] = {
      {{.kind = sgd, .momentum = -0.5},
       "optimizer.sgd.momentum: expected a finite number of 0 or above, got -0.5"},
      {{.kind = sgd, .momentum = nan},
       "optimizer.sgd.momentum: expected a finite number of 0 or above, got nan"},
      {{.kind = sgd, .momentum = 0.9, .dampening = 1.5},
       "optimizer.sgd.dampening: expected 0..1, got 1.5"},
      {{.kind = sgd, .nesterov = true},
       "optimizer.sgd.nesterov: expected momentum above 0 and no dampening, got others"},
      {{.kind = adam, .beta1 = 1, .beta2 = 0, .epsilon = 1},
       "optimizer.adamw.beta1: expected 0 or above, below 1, got 1"},
      {{.kind = adam, .beta1 = 0, .beta2 = -1, .epsilon = 1},
       "optimizer.adamw.beta2: expected 0 or above, below 1, got -1"},
      {{.kind = adam}, "optimizer.adamw.epsilon: expected a finite number above 0, got 0"},
      {{.groups = {0, 0}}, "optimizer.group: expected 0..1, got 2"},
      {{.groups = {64}}, "optimizer.group[0]: expected 0..63, got 64"}};
  for (const auto& [spec, message] : cases) {
    EXPECT_EQ(CheckOptimizer(spec, graph, weights).message(), message);
  }
  for (const OptimizerSpec& spec : EveryOptimizer()) {
    EXPECT_TRUE(CheckOptimizer(spec, graph, weights).ok());
    EXPECT_EQ(CheckOptimizer(spec, half, weights).message(),
              "parameter_element: expected float32, since parameters are trained, got float16");
  }
  EXPECT_TRUE(CheckOptimizer({.groups = {63}}, half, weights).ok());
}

TEST(Optimizer, RefusesValuesOfAStepThatTheModuleHasNoRoomFor) {
  const OptimizerSpec plain{.kind = OptimizerKind::kSgd};
  const OptimizerSpec momentum{.kind = OptimizerKind::kSgd, .momentum = 0.5};
  const OptimizerSpec adam = EveryOptimizer()[4], amsgrad = EveryOptimizer()[6];
  EXPECT_TRUE(CheckStepValues("v.", {.spec = plain}, momentum).ok());
  EXPECT_TRUE(CheckStepValues("v.", {.spec = adam}, amsgrad).ok());
  EXPECT_EQ(CheckStepValues("v.", {.spec = momentum}, plain).message(),
            "v.momentum: expected none, as the module was registered, got some");
  EXPECT_EQ(CheckStepValues("v.", {.spec = amsgrad}, adam).message(),
            "v.amsgrad: expected none, as the module was registered, got some");
  EXPECT_EQ(CheckStepValues("v.", {.spec = {.kind = OptimizerKind::kAdamW}}, adam).message(),
            "v.epsilon: expected a finite number above 0, got 0");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(CheckStepValues("v.", {adam, {.learning_rate = nan}}, adam).message(),
            "v.learning_rate: expected a finite number, got nan");
}

}  // namespace
}  // namespace attnd
