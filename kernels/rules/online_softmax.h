// The row recurrence of softmax. In units of log2, with a stabiliser r and l = Σ 2^(score − r) over
// the keys seen so far, a row of probabilities is 2^(score − r) / l.
//
// The stabiliser may lag behind the row's maximum by kLag, so it seldom moves and rescaling leaves
// the hot path; P stays below 2^kLag, far inside float16. Where P is truncated to float16 (one
// cheap instruction on Volta), the mean loss kTruncationLoss is given back by making P larger by
// that much (kTruncationBias off the stabiliser) and dividing by a sum of the untruncated numbers,
// so that P = 1 stays 1 and sums are exact: O = (1 + loss)·Σ P·V / l. Where P is rounded to
// nearest, there is no loss.
#pragma once

#include "kernels/rules/score_rules.h"

namespace attnd {

// lse of a row that sees nothing but −infinity: NaN, from 0/0 as in the reference, with bits that
// no arithmetic makes. merge_runs.h tells by them that other runs may show the row more.
inline constexpr uint32_t kNothingFinite = 0x7ffffffeu;

inline constexpr float kLag = 8.0f;
inline constexpr float kTruncationLoss = 3.52e-4f;
inline constexpr float kTruncationBias = 5.077e-4f;  // log2(1 + kTruncationLoss)

// TruncatedP tells how P and dS become 16-bit numbers. kMargin keeps dS below the numbers that
// become infinite (GainOf).
struct TruncatedP {
  static constexpr float kLoss = kTruncationLoss, kBias = kTruncationBias;
  static constexpr float kMargin = 1;
};
struct RoundedP {
  static constexpr float kLoss = 0, kBias = 0;
  static constexpr float kMargin = 1.002f;
};

struct RowEnd {
  float factor;  // O = factor · Σ P·V, dropout's scale included
  float lse;     // natural logarithm; −infinity where no key is visible
};

// Finishes a row after its last key. `visible` of the sequence's keys were visible; `gain` is 1 +
// the mean loss of P.
ATTN_HD RowEnd FinishRow(const ScoreContext& at, float gain, float stabilizer, float sum,
                         int visible) {
  if (visible == 0) return {0, -Infinity()};
  const ProblemDesc& problem = at.problem;
  float top = stabilizer, shrink = 1, total = sum;
  if (problem.denominator != kDenominatorSoftmax) {
    bool sink = problem.denominator == kDenominatorSink;
    float extra = sink ? ptx::LoadConstantFloat(problem.sink_logits + at.head) * kLog2E : 0.0f;
    float count = sink ? 1.0f : static_cast<float>(at.sequence.kv_len - visible);
    top = count > 0 ? ptx::Max(stabilizer, extra) : stabilizer;
    shrink = ptx::Exp2(stabilizer - top);
    // Where there is no rest, 2^(extra − top) may be infinite.
    total = sum * shrink + (count > 0 ? count * ptx::Exp2(extra - top) : 0);
  }
  float factor = shrink * gain * problem.dropout_scale;
  const float lse =
      total != 0 ? (top + ptx::Log2(total)) * kLn2 : ptx::BitsFloat(kNothingFinite);
  return {factor * ptx::Reciprocal(total), lse};
}

}  // namespace attnd
