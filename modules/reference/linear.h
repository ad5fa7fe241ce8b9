// out = in · Wᵀ + b in float64, and its gradients. Operands have been rounded by the caller. Pure
// functions; any thread.
#pragma once

#include <cstdint>

#include "modules/reference/rounding.h"

namespace attnd {

struct LinearSizes {
  int64_t rows = 0, in = 0, out = 0;
  bool transposed = false;  // W is [in, out], else [out, in]
  int64_t WeightIndex(int64_t o, int64_t i) const { return transposed ? i * out + o : o * in + i; }
};

// `bias` may be null. Returns [rows, out].
Numbers LinearForward(const LinearSizes& sizes, const Numbers& in, const Numbers& weight,
                      const Numbers* bias);

// Returns [rows, in].
Numbers LinearInputGradient(const LinearSizes& sizes, const Numbers& d_out, const Numbers& weight);

// Adds to d_weight, of the weight's shape, and to d_bias [out]; either may be null.
void AddLinearGradients(const LinearSizes& sizes, const Numbers& in, const Numbers& d_out,
                        const Rounder& round, Numbers* d_weight, Numbers* d_bias);

}  // namespace attnd
