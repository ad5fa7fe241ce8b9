// Shard: a piece of one logical call, a range of batch entries (packed: of sequences) times a range
// of KV heads with the query heads that use them. It is a whole problem of its own, sent as one
// unary RPC; its results are bitwise those of the unsharded call.
//
//   SubProblem   the shard's Problem: every option cut to its range, and its place for dropout
//   ShardRunsOf  where each of its tensors lies in the caller's arrays
//
// The gradient of a broadcast bias is a sum over heads, then batch entries. Float addition does not
// associate, so a shard that holds part of such a sum asks for the addends: the bias is repeated
// per head or batch entry (expand_*), and BiasGradientSum adds them in the contract's order.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "client/cpp/strided_runs.h"

namespace attnd {

struct ShardRange {
  int64_t batch_begin = 0, batch_count = 0;
  int64_t kv_head_begin = 0, kv_head_count = 0;
  bool expand_bias_batch = false, expand_bias_heads = false;
};

Problem SubProblem(const Problem& whole, const ShardRange& range);

// A packed shard whose sequences have no queries or no keys: there is nothing to send, its results
// are zeros (lse −infinity).
bool IsTrivial(const Problem& whole, const ShardRange& range);

// Byte ranges within the caller's arrays. q also places d_q, and so on.
struct ShardRuns {
  StridedRuns q, k, v, o;
  StridedRuns lse;
  StridedRuns mask_bits;  // iff bool_mask
  StridedRuns bias;       // iff bias
  StridedRuns d_bias;     // iff bias; where the gradient lies when it is not summed here
  StridedRuns d_sink;     // [batch, q_heads]
};

ShardRuns ShardRunsOf(const Problem& whole, const ShardRange& range);

}  // namespace attnd
