// ErrorBounds: how far an engine's results may lie from exact attention, element by element. A
// first-order analysis of rounding in float64, derived in docs/NUMERICS.md, not tuned: it follows
// each rounding of the engine's steps through softmax and its derivative, takes √n growth for sums
// of n roundings, and allows twice the outcome.
#pragma once

#include <vector>

#include "attention/reference.h"

namespace attnd {

// How an engine rounds inside. The defaults are those of an engine that keeps everything in
// float32.
struct EnginePrecision {
  double product_unit = 0x1p-24;  // relative error of one multiplication and addition in a product
  double operand_unit_f16 = 0;  // rounding of P and dS before they are multiplied, float16 problems
  double operand_unit_bf16 = 0;         // ... bfloat16 problems
  double operand_unit_f32 = 0;          // ... float32 problems
  double operand_underflow = 0x1p-125;  // absolute error of P and dS: below it they may become 0
  double gradient_underflow = 0;        // of dS, where its range is the smaller one
  // Rounding of each tile's share of dQ, of (Z·‖dO‖·max‖V‖ + |delta|)·max|K| over what the row
  // sees.
  double query_gradient_unit = 0;
  // Absolute error of dS in float16, of the largest Z·‖dO‖·max‖V‖ + |delta| of 64 neighbouring
  // rows.
  double gradient_range_f16 = 0;

  double OperandUnit(ElementType element) const;

  static EnginePrecision Float32() { return {}; }
  // 16-bit problems round P and dS to 16 bits for the matrix units.
  static EnginePrecision HalfOperands() {
    return {.operand_unit_f16 = 0x1p-11,
            .operand_unit_bf16 = 0x1p-8,
            .operand_underflow = 0x1p-25,
            .query_gradient_unit = 0x1p-28,
            .gradient_range_f16 = 0x1p-36};
  }
  // Matrix products accumulate in float16 (AccumulateType::kFloat16).
  EnginePrecision WithHalfAccumulation() const;
};

struct ForwardBounds {
  std::vector<double> o, lse;
};
struct BackwardBounds {
  std::vector<double> d_q, d_k, d_v, d_bias, d_sink;
};

// Bounds for outputs rounded to the problem's element type (lse, d_bias and d_sink to float32).
// A bound is NaN where a non-finite input makes it meaningless. `exact` are the reference's
// results; for backward, the o and lse from which `gradients` were computed.
ForwardBounds BoundForward(const Reference& reference, const ReferenceOutputs& exact,
                           const EnginePrecision& precision);
BackwardBounds BoundBackward(const Reference& reference, const ReferenceOutputs& exact,
                             const ReferenceGradients& gradients, const std::vector<double>& d_o,
                             const float* d_lse, const EnginePrecision& precision);

}  // namespace attnd
