// Layer and RMS normalisation of vectors that lie end to end, and their gradients: the equations of
// modules/reference/norm.h in float32, statistics in vectors' own fixed order. No bit depends on
// how vectors are cut among threads. Any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/cpu/dense/pointwise.h"

namespace attnd {

struct NormOperands {
  int64_t count = 0;        // numbers of a vector
  bool is_centred = false;  // layer norm; else RMS
  float epsilon = 0;
  float weight_offset = 0;
  std::optional<ElementType> round_before_weight;
  ConstTensor weight, bias;  // [count] or null
  ConstTensor x;             // [vectors, count]
};

struct NormStatistics {
  float mean, rstd;
};

void NormForward(const NormOperands& norm, Tensor y, IndexRange vectors);

// dx, and each vector's statistics for AddNormGradients.
void NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                  NormStatistics* statistics, IndexRange vectors);

// Adds Σ dy·n to d_weight and Σ dy to d_bias [count], either of which may be null, for the columns
// named: one addition for each kGradientBlockRows rows, `per_row` vectors making a row.
struct NormGradients {
  ConstTensor dy;
  const NormStatistics* statistics = nullptr;
  int64_t vectors = 0, per_row = 1;
  float* d_weight = nullptr;
  float* d_bias = nullptr;
};
void AddNormGradients(const NormOperands& norm, const NormGradients& gradients, IndexRange columns);

}  // namespace attnd
