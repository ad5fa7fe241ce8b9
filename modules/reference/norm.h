// Layer and RMS normalisation of vectors of `count` numbers, in float64, and their gradients:
//     n = (x − mean)·rstd, or x·rstd          y = n·(w + offset) + b
//     dn = dy·(w + offset)     dx = rstd·(dn − mean(dn) − n·mean(dn·n)), RMS without mean(dn)
//     dw = Σ dy·n              db = Σ dy
// Rounding n (round_before_weight) is the identity in backward; y and dw read the rounded n.
// Source: Ba, Kiros, Hinton, arXiv 1607.06450; Zhang, Sennrich, arXiv 1910.07467.
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "modules/layout.h"
#include "modules/reference/rounding.h"

namespace attnd {

struct NormRule {
  NormKind kind = NormKind::kRms;
  double epsilon = 0;
  double weight_offset = 0;
  std::optional<ElementType> round_before_weight;
  const Numbers* weight = nullptr;  // [count], or null: 1
  const Numbers* bias = nullptr;    // [count], or null: 0
};

// `vectors` is [vectors, count]; the result has its shape.
Numbers NormForward(const NormRule& rule, int64_t count, const Numbers& vectors,
                    const Rounder& round);

Numbers NormInputGradient(const NormRule& rule, int64_t count, const Numbers& vectors,
                          const Numbers& d_out);

// Adds to d_weight and d_bias [count], either of which may be null. `per_row` vectors make a row.
void AddNormGradients(const NormRule& rule, int64_t count, int64_t per_row, const Numbers& vectors,
                      const Numbers& d_out, const Rounder& round, Numbers* d_weight,
                      Numbers* d_bias);

}  // namespace attnd
