// Activations and dropout of single numbers, in float64, and their derivatives. Pure functions; any
// thread.
#pragma once

#include <cstdint>

#include "modules/layout.h"
#include "modules/reference/rounding.h"

namespace attnd {

// relu max(x, 0); gelu x·Φ(x); gelu_tanh ½x(1 + tanh(√(2/π)(x + 0.044715x³))); silu x·σ(x);
// quick_gelu x·σ(1.702x); tanh. (Hendrycks, Gimpel, arXiv 1606.08415.)
double Activate(ActivationKind kind, double x);
double ActivationSlope(ActivationKind kind, double x);  // at 0, relu's is 0
// dy times the slope. Of relu dy or 0: an infinite dy is none where relu lets nothing through.
double ActivationGradient(ActivationKind kind, double x, double dy);

struct DropoutPlace {
  uint64_t seed = 0, offset = 0;  // the offset with its site
  int64_t first_row = 0;          // of the tensor in the caller's whole one
};
// Each number of [rows, columns] times 0, also where it is not finite, or 256 / (256 − threshold).
Numbers ApplyDropout(const DropoutPlace& place, uint32_t threshold, int64_t columns,
                     const Numbers& values);

}  // namespace attnd
