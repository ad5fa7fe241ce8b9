// CallReceipt: what was done: the servers' receipts of all shards, merged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "attention/problem.h"
#include "client/types/capture.h"

namespace attnd {

struct CallReceipt {
  struct Stage {
    std::string name;  // receive, queue, h2d, kernel, d2h, send
    absl::Duration total;
    absl::Duration longest;  // of one shard
  };
  std::string backend, device, kernel;  // of the first shard; others differ only between replicas
  AccumulateType accumulate = AccumulateType::kFloat32;
  double dropout_p_effective = 0;
  bool deterministic = true;
  std::vector<Stage> stages;
  int64_t shards = 0;
  int64_t retries = 0;
  int64_t leased = 0;  // backward: shards whose tensors the server had; forward: shards it keeps
  int64_t shared = 0;  // shards whose tensors lay in memory shared with the daemon
  int64_t bytes_sent = 0;      // payload, retries included
  int64_t bytes_received = 0;  // payload
  int64_t bytes_copied = 0;    // of those sent: gathered first, since they lay in small pieces
  absl::Duration elapsed;
  std::optional<CapturedAttention> captured;  // iff CallOptions::capture
};

}  // namespace attnd
