// PlanShards: how one logical call is cut into RPCs. Pure arithmetic on the Problem.
//
// Three ways to cut are tried: ranges of batch entries with all heads, ranges of heads with all
// batch entries, and ranges of heads within one batch entry. The one that keeps its messages within
// the target wins, then the one that sends the fewest bytes (broadcast masks and biases are sent
// once a shard), then the first. A shard of one entry that is still above the target is cut by rows
// of Q, or by keys (shard_cut.h), as far as that makes the messages smaller without sending much
// more: each piece brings the keys, or the rows, that it needs.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "attention/shard.h"
#include "client/shards/shard_cut.h"

namespace attnd {

struct PlanLimits {
  int64_t target_bytes = int64_t{8} << 20;        // of a shard's larger message
  int64_t max_message_bytes = int64_t{16} << 20;  // header included; what the servers take
  bool merge = false;        // also cut where parts have to be put together (IsPartial)
  // A call that computes for so long that bytes do not matter is cut for so many devices, whatever
  // that adds: one head by rows of Q, where no parts have to be put together.
  int64_t devices = 1;
  double max_extra = 0.5;    // that cutting a shard's rows or keys may add to its bytes
  double least_gain = 0.25;  // by which its largest message must shrink
  CutSteps steps;
};

struct MessageSizes {
  int64_t request = 0, reply = 0;  // payload and an upper bound of the header
};

// Counts the bytes of the shard's two messages. `want_lse` and `d_lse` count lse of a forward reply
// and d_lse of a backward request.
MessageSizes MessageSizesOf(const Problem& sub_problem, Direction direction);

// Whether a call computes for longer than even several times its bytes take on one host.
bool ComputesLong(const Problem& problem, Direction direction);

// In ascending order of batch entry, head, then row or key. At least one; together they cover the
// problem. The problem is valid. Errors: OUT_OF_RANGE when one batch entry's KV-head group alone is
// above max_message_bytes.
absl::StatusOr<std::vector<ShardRange>> PlanShards(const Problem& problem, Direction direction,
                                                   const PlanLimits& limits);

// Whether the shards' bias gradients have to be added up (BiasGradientSum) rather than placed.
bool NeedsBiasGradientSum(const Problem& problem, const std::vector<ShardRange>& shards);

}  // namespace attnd
