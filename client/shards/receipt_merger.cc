#include "client/shards/receipt_merger.h"

#include <algorithm>

namespace attnd {

void ReceiptMerger::Add(const ShardReceipt& shard) {
  if (first_) {
    receipt_.backend = shard.backend;
    receipt_.device = shard.device;
    receipt_.kernel = shard.kernel;
    receipt_.dropout_p_effective = shard.dropout_p_effective;
    receipt_.stages.reserve(shard.stages.size());
    first_ = false;
  }
  // One shard in float16 makes the whole result so; likewise for determinism.
  if (shard.float16) receipt_.accumulate = AccumulateType::kFloat16;
  receipt_.deterministic &= shard.deterministic;
  for (const ShardReceipt::Stage& stage : shard.stages) {
    auto same = [&](const CallReceipt::Stage& s) { return s.name == stage.name; };
    auto it = std::find_if(receipt_.stages.begin(), receipt_.stages.end(), same);
    if (it == receipt_.stages.end()) {
      it = receipt_.stages.insert(it, {stage.name, absl::ZeroDuration(), absl::ZeroDuration()});
    }
    it->total += stage.duration;
    it->longest = std::max(it->longest, stage.duration);
  }
}

}  // namespace attnd
