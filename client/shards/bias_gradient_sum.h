// BiasGradientSum: rebuilds the gradient of a broadcast bias from the shards' addends, bitwise as
// one unsharded call gives it: T_b = Σ_h u_bh one head after the other, then Σ_b T_b one batch
// entry after the other, in float32. Shards may arrive in any order; each is added when all before
// it have been, so at most the early ones are held.
//
// Threads: Add may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "attention/problem.h"
#include "attention/shard.h"

namespace attnd {

class BiasGradientSum {
 public:
  // `problem` and `shards` outlive it, as does `d_bias` (of the bias's shape). Shards are in
  // the planner's order.
  BiasGradientSum(const Problem& problem, const std::vector<ShardRange>& shards, float* d_bias);

  // The d_bias of shard `index`, of its own bias shape; empty for zeros. Once for each shard.
  void Add(int64_t index, std::vector<float> gradient);

 private:
  void AddShard(const ShardRange& range, const std::vector<float>& gradient)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds a [rows, columns] plane, or copies the first. The bias's own planes may be larger: there
  // the addend is zero.
  void AddPlane(const BroadcastShape& from_shape, const float* from, bool first, float* to);

  const Problem& problem_;
  const std::vector<ShardRange>& shards_;
  float* const d_bias_;
  absl::Mutex mutex_;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::vector<float>> early_ ABSL_GUARDED_BY(mutex_);
  std::vector<float> head_sum_ ABSL_GUARDED_BY(mutex_);  // T_b so far, [rows, columns]
};

}  // namespace attnd
