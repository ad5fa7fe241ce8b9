// ClassOrder: in which order a call by residue classes has its rows' numbers (lse and what has its
// shape) on a device: within a sequence those of residue 0, of residue 1, ..., each ascending. Rows
// of tensors stay where they are. Arrays are [batch, q_heads, q_len] or packed, and do not overlap.
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "attention/residue_classes.h"

namespace attnd::cuda {

// How many of rows 0 .. length − 1 have a smaller residue.
int64_t RowsBefore(int64_t length, int64_t p, int64_t residue);

void ToClassOrder(const Problem& problem, const ResidueClasses& classes, const float* in,
                  float* out);
void FromClassOrder(const Problem& problem, const ResidueClasses& classes, const float* in,
                    float* out);

}  // namespace attnd::cuda
