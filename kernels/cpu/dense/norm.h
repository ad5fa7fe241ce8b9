// Layer and RMS normalisation of vectors that lie end to end, and their gradients: the equations of
// modules/reference/norm.h in float32, statistics in vectors' own fixed order. No bit depends on
// how vectors are cut among threads. Any thread.
#pragma once

#include <cstdint>

#include "kernels/cpu/dense/pointwise.h"

namespace attnd {

void NormForward(const NormOperands& norm, Tensor y, IndexRange vectors);

// dx, and each vector's statistics for AddNormGradients.
void NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                  NormStatistics* statistics, IndexRange vectors);

// For the columns named.
void AddNormGradients(const NormOperands& norm, const NormGradients& gradients, IndexRange columns);

}  // namespace attnd
