#include "client/demo/adamw.h"

#include <algorithm>
#include <cmath>

namespace attnd::demo {

AdamW::AdamW(std::vector<Parameter*> parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)), options_(options) {
  for (const Parameter* p : parameters_) {
    first_.emplace_back(p->value.size());
    second_.emplace_back(p->value.size());
  }
}

double AdamW::Step(double rate_factor) {
  double squares = 0;
  for (const Parameter* p : parameters_) {
    for (float g : p->gradient) squares += static_cast<double>(g) * g;
  }
  double norm = std::sqrt(squares);
  double clip = std::min(1.0, options_.largest_gradient_norm / std::max(norm, 1e-30));
  ++steps_;
  double rate = options_.rate * rate_factor;
  double correction1 = 1 - std::pow(options_.beta1, steps_);
  double correction2 = 1 - std::pow(options_.beta2, steps_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = *parameters_[i];
    double keep = p.decays ? 1 - rate * options_.weight_decay : 1;
    for (size_t j = 0; j < p.value.size(); ++j) {
      double g = p.gradient[j] * clip;
      double m = options_.beta1 * first_[i][j] + (1 - options_.beta1) * g;
      double v = options_.beta2 * second_[i][j] + (1 - options_.beta2) * g * g;
      first_[i][j] = static_cast<float>(m);
      second_[i][j] = static_cast<float>(v);
      double step = m / correction1 / (std::sqrt(v / correction2) + options_.epsilon);
      p.value[j] = static_cast<float>(p.value[j] * keep - rate * step);
    }
  }
  return norm;
}

}  // namespace attnd::demo
