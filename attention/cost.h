// Counts what a Problem costs, in floating-point operations and bytes, for limits, admission,
// batching and metrics.
#pragma once

#include <cstdint>

#include "attention/problem.h"

namespace attnd {

// Visible pairs (row, key) by causal, window and lengths, over all batch entries and heads. Bool
// masks and biases are not read. Closed form: O(batch) whatever the lengths. At most 2^60 for a
// validated problem, since q has at most 2^40 elements and kv_len at most 2^20.
int64_t VisiblePairs(const Problem& problem);

// Counts the work of one pair: 2·(qk_head_dim + v_head_dim) forward, 2.5 times that backward (five
// products for two).
double ScoreFlops(const Problem& problem, Direction direction);
// Counts the work of all visible pairs.
double Flops(const Problem& problem, Direction direction);

// Payload bytes of the request (residuals included for backward) and of the reply.
struct PayloadBytes {
  int64_t input = 0;
  int64_t output = 0;
};
PayloadBytes BytesOf(const Problem& problem, Direction direction);

}  // namespace attnd
