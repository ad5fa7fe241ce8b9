// Shard: a piece of one logical call, a range of batch entries (packed: of sequences) times a range
// of KV heads with the query heads that use them; of one entry also a range of its rows and of its
// keys. It is a whole problem of its own, sent as one RPC; its results are bitwise those of the
// unsharded call, or parts of them (IsPartial).
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
#include "attention/strided_runs.h"

namespace attnd {

enum class Cut : uint8_t {
  kNone,
  kRows,  // some rows of Q, with at least the keys that they see
  kKeys,  // some keys, with at least the rows that see them; the denominator is softmax
};

struct ShardRange {
  int64_t batch_begin = 0, batch_count = 0;
  int64_t kv_head_begin = 0, kv_head_count = 0;
  bool expand_bias_batch = false, expand_bias_heads = false;
  // Unless kNone: rows and keys inside the sequence of the only batch entry. Not with dropout,
  // whose bits depend on the place of row and key in the whole.
  Cut cut = Cut::kNone;
  int64_t row_begin = 0, row_count = 0, key_begin = 0, key_count = 0;
};

// Whether results have to be put together from several shards (ShardMerger): backward's d_k, d_v
// and d_sink of some rows, forward's o and lse of some keys.
bool IsPartial(const ShardRange& range, Direction direction);

Problem SubProblem(const Problem& whole, const ShardRange& range);

// A shard without queries or without keys: there is nothing to send, its results are zeros (lse
// −infinity).
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
