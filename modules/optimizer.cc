#include "modules/optimizer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "modules/field_error.h"

namespace attnd {
namespace {

absl::Status CheckBetween(absl::string_view path, double value, bool is_inside,
                          absl::string_view expected) {
  if (std::isfinite(value) && is_inside) return absl::OkStatus();
  return WrongField(path, expected, value);
}

absl::Status CheckSgd(absl::string_view path, const OptimizerSpec& spec) {
  RETURN_IF_ERROR(CheckBetween(absl::StrCat(path, "momentum"), spec.momentum, spec.momentum >= 0,
                               "a finite number of 0 or above"));
  RETURN_IF_ERROR(CheckBetween(absl::StrCat(path, "dampening"), spec.dampening,
                               spec.dampening >= 0 && spec.dampening <= 1, "0..1"));
  if (!spec.nesterov || (spec.momentum > 0 && spec.dampening == 0)) return absl::OkStatus();
  return WrongField(absl::StrCat(path, "nesterov"), "momentum above 0 and no dampening", "others");
}

absl::Status CheckAdamW(absl::string_view path, const OptimizerSpec& spec) {
  RETURN_IF_ERROR(CheckBetween(absl::StrCat(path, "beta1"), spec.beta1,
                               spec.beta1 >= 0 && spec.beta1 < 1, "0 or above, below 1"));
  RETURN_IF_ERROR(CheckBetween(absl::StrCat(path, "beta2"), spec.beta2,
                               spec.beta2 >= 0 && spec.beta2 < 1, "0 or above, below 1"));
  return CheckBetween(absl::StrCat(path, "epsilon"), spec.epsilon, spec.epsilon > 0,
                      "a finite number above 0");
}

// The gradient's part of the step, before momentum: scaled, and with the decay where it is coupled.
float Scaled(const StepScalars& s, bool is_coupled, float gradient, float parameter) {
  const float g = s.multiplier * gradient;
  if (!is_coupled || s.decay == 0) return g;  // 0 of an infinite parameter would be NaN
  const float decay = s.decay * parameter;
  return g + decay;
}

void ApplySgd(const OptimizerSpec& spec, const StepScalars& s, absl::Span<const float> gradient,
              absl::Span<float> parameter, const Moments& moments) {
  for (size_t n = 0; n < parameter.size(); ++n) {
    float g = Scaled(s, true, gradient[n], parameter[n]);
    if (spec.momentum > 0) {
      float& b = moments.first[n];
      const float kept = s.momentum * b, gained = s.gain * g;
      b = s.is_first ? g : kept + gained;
      const float ahead = s.momentum * b;
      g = spec.nesterov ? g + ahead : b;
    }
    const float change = s.rate * g;
    parameter[n] -= change;
  }
}

void ApplyAdamW(const OptimizerSpec& spec, const StepScalars& s, absl::Span<const float> gradient,
                absl::Span<float> parameter, const Moments& moments) {
  for (size_t n = 0; n < parameter.size(); ++n) {
    float p = parameter[n];
    const float g = Scaled(s, spec.coupled_decay, gradient[n], p);
    if (!spec.coupled_decay) p *= s.decay;
    float &m = moments.first[n], &v = moments.second[n];
    const float away = g - m, toward = away * s.toward1;
    m += toward;
    const float kept = s.keep2 * v, gained = s.toward2 * g, square = gained * g;
    v = kept + square;
    float w = v;
    if (spec.amsgrad) {
      float& most = moments.second_max[n];
      if (!(most >= v) && !std::isnan(most)) most = v;  // as torch.maximum: a NaN stays
      w = most;
    }
    const float root = std::sqrt(w), corrected = root / s.root_correction;
    const float under = corrected + s.epsilon, over = s.rate * m, change = over / under;
    parameter[n] = p - change;
  }
}

}  // namespace

int64_t OptimizerSpec::MomentCount() const {
  if (kind == OptimizerKind::kAdamW) return amsgrad ? 3 : 2;
  return kind == OptimizerKind::kSgd && momentum > 0 ? 1 : 0;
}

absl::Status CheckStepValues(absl::string_view path, const StepValues& values,
                             const OptimizerSpec& registered) {
  const OptimizerSpec& spec = values.spec;
  RETURN_IF_ERROR(
      FieldIsFinite(absl::StrCat(path, "learning_rate"), values.rates.learning_rate));
  RETURN_IF_ERROR(FieldIsFinite(absl::StrCat(path, "weight_decay"), values.rates.weight_decay));
  if (spec.kind == OptimizerKind::kSgd) RETURN_IF_ERROR(CheckSgd(path, spec));
  if (spec.kind == OptimizerKind::kAdamW) RETURN_IF_ERROR(CheckAdamW(path, spec));
  if (spec.MomentCount() <= registered.MomentCount()) return absl::OkStatus();
  return WrongField(absl::StrCat(path, spec.amsgrad ? "amsgrad" : "momentum"),
                    "none, as the module was registered", "some");
}

absl::Status CheckOptimizer(const OptimizerSpec& spec, const ModuleGraph& graph,
                            const WeightTable& weights) {
  if (spec.kind == OptimizerKind::kSgd) RETURN_IF_ERROR(CheckSgd("optimizer.sgd.", spec));
  if (spec.kind == OptimizerKind::kAdamW) {
    RETURN_IF_ERROR(CheckAdamW("optimizer.adamw.", spec));
  }
  const int64_t entries = static_cast<int64_t>(weights.entries().size());
  RETURN_IF_ERROR(FieldInRange("optimizer.group", spec.groups.size(), 0, entries));
  for (size_t n = 0; n < spec.groups.size(); ++n) {
    if (spec.groups[n] < kMaxOptimizerGroups) continue;
    return FieldInRange(absl::StrCat("optimizer.group[", n, "]"), spec.groups[n], 0,
                        kMaxOptimizerGroups - 1);
  }
  const bool trains = spec.kind != OptimizerKind::kNone && weights.trained_elements() > 0;
  if (!trains || graph.layout().parameter_element == ElementType::kFloat32) return absl::OkStatus();
  return WrongField("parameter_element", "float32, since parameters are trained",
                    ElementName(graph.layout().parameter_element));
}

StepScalars ScalarsOf(const OptimizerSpec& spec, const GroupRates& rates, int64_t step,
                      double multiplier) {
  const bool is_adam = spec.kind == OptimizerKind::kAdamW;
  const double decoupled = 1 - rates.learning_rate * rates.weight_decay;
  const bool is_decoupled = is_adam && !spec.coupled_decay;
  const double t = static_cast<double>(step);
  const double correction = is_adam ? 1 - std::pow(spec.beta1, t) : 1;
  return {.multiplier = static_cast<float>(multiplier),
          .decay = static_cast<float>(is_decoupled ? decoupled : rates.weight_decay),
          .rate = static_cast<float>(rates.learning_rate / correction),
          .momentum = static_cast<float>(spec.momentum),
          .gain = static_cast<float>(1 - spec.dampening),
          .toward1 = static_cast<float>(1 - spec.beta1),
          .keep2 = static_cast<float>(spec.beta2),
          .toward2 = static_cast<float>(1 - spec.beta2),
          .root_correction = static_cast<float>(std::sqrt(1 - std::pow(spec.beta2, t))),
          .epsilon = static_cast<float>(spec.epsilon),
          .is_first = step == 1};
}

void ApplyStep(const OptimizerSpec& spec, const StepScalars& scalars,
               absl::Span<const float> gradient, absl::Span<float> parameter, Moments moments) {
  CHECK(gradient.size() == parameter.size());
  if (spec.kind == OptimizerKind::kSgd) ApplySgd(spec, scalars, gradient, parameter, moments);
  if (spec.kind == OptimizerKind::kAdamW) ApplyAdamW(spec, scalars, gradient, parameter, moments);
}

double SquaredNorm(absl::Span<const float> gradient) {
  constexpr size_t kRun = 1024, kTogether = 8;  // runs at once: none waits for its own additions
  double sum = 0;
  size_t begin = 0;
  for (; begin + kTogether * kRun <= gradient.size(); begin += kTogether * kRun) {
    double runs[kTogether] = {};
    for (size_t n = 0; n < kRun; ++n) {
      for (size_t run = 0; run < kTogether; ++run) {
        const double g = gradient[begin + run * kRun + n];
        runs[run] += g * g;
      }
    }
    for (double run : runs) sum += run;
  }
  for (; begin < gradient.size(); begin += kRun) {
    double run = 0;
    for (float g : gradient.subspan(begin, kRun)) run += double{g} * double{g};
    sum += run;
  }
  return sum;
}

double ClipFactor(double squared_norm, double multiplier, double max_norm) {
  if (max_norm == 0) return 1;
  const double norm = std::fabs(multiplier) * std::sqrt(squared_norm);
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace attnd
