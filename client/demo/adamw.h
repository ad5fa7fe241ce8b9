// AdamW (Loshchilov and Hutter 2019, Algorithm 2) with the gradient's norm clipped first.
#pragma once

#include <vector>

#include "client/demo/layers.h"

namespace attnd::demo {

struct AdamWOptions {
  double rate = 3e-3;
  double beta1 = 0.9, beta2 = 0.99;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  double largest_gradient_norm = 1;
};

class AdamW {
 public:
  AdamW(std::vector<Parameter*> parameters, const AdamWOptions& options);
  // Moves every parameter by its gradient, at rate·rate_factor. Returns the norm before clipping.
  double Step(double rate_factor);

 private:
  std::vector<Parameter*> parameters_;
  AdamWOptions options_;
  std::vector<Floats> first_, second_;  // moments, one per parameter
  int steps_ = 0;
};

}  // namespace attnd::demo
