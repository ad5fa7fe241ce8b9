// ShardMerger: puts the results of partial shards (IsPartial) together, each set of them that stems
// from one shard as soon as its last part is there, in the order of rows or keys whatever the order
// of arrival.
//
//   forward, cut by keys    lse = ln Σ exp(lse_s) (+ exp(sink)),  o = Σ exp(lse_s − lse)·o_s
//   backward, cut by rows   d_k, d_v, d_sink = Σ of the parts, in float32
//
// Exact to rounding: a part's o, d_k and d_v have been rounded to the call's element once more than
// the uncut call's. A key or row that is in no part has no visible counterpart: zeros, lse
// −infinity. (Milakov and Gimelshein 2018; Rabe and Staats 2021, for the merge by lse)
//
// Threads: Add may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "attention/problem.h"
#include "attention/shard.h"

namespace attnd {

// One part gives this, in the wire's order of its own tensors; all empty where nothing was sent.
struct ShardPart {
  std::vector<std::byte> o;  // forward
  std::vector<float> lse;
  std::vector<std::byte> d_k, d_v;  // backward
  std::vector<float> d_sink;        // with a sink
};

class ShardMerger {
 public:
  // Where merged results go: the caller's whole arrays. lse may be null.
  struct Outputs {
    void* o = nullptr;
    float* lse = nullptr;
    void* d_k = nullptr;
    void* d_v = nullptr;
    float* d_sink = nullptr;
  };

  // `problem` and `shards` outlive it. Shards are in the planner's order.
  ShardMerger(const Problem& problem, const std::vector<ShardRange>& shards, Direction direction,
              const Outputs& outputs);

  // Whether there is anything to merge.
  static bool IsNeeded(const std::vector<ShardRange>& shards, Direction direction);

  // Adds a part of a partial shard, once for each.
  void Add(int64_t shard, ShardPart part);

 private:
  // The parts of one uncut shard: shards [first, first + count).
  struct Group {
    int64_t first, count;
    int64_t missing;
  };

  void Merge(const Group& group);
  void MergeForward(const Group& group, const ShardRange& whole);
  void MergeBackward(const Group& group, const ShardRange& whole);
  // Sums the parts of d_k or d_v, rounded to the call's element; `sub` is the uncut shard.
  std::vector<std::byte> SumOfParts(const Group& group, std::vector<std::byte> ShardPart::*tensor,
                                    const Problem& sub, int64_t dim) const;

  const Problem& problem_;
  const std::vector<ShardRange>& shards_;
  const Direction direction_;
  const Outputs outputs_;
  std::vector<ShardPart> parts_;  // of each shard; read when its group is complete
  absl::Mutex mutex_;
  std::vector<Group> groups_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> group_of_;  // of each shard; −1: not partial
};

}  // namespace attnd
