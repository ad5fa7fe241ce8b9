// ReplyLandings: where the chunks of one reply land that come over several streams, in any order.
// The arrays outlive it. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "attention/strided_runs.h"
#include "client/call/reply_decoder.h"
#include "proto/attnd/v1/chunk_grid.h"

namespace attnd {

class ReplyLandings {
 public:
  explicit ReplyLandings(const std::vector<ReplyPayload>& payloads);

  // Where a chunk goes. DATA_LOSS where it is none of the reply's, or has come before.
  absl::StatusOr<RunCursor> Claim(uint64_t field, uint64_t offset, int64_t bytes);
  void Landed(int64_t bytes);
  // DATA_LOSS unless all have landed.
  absl::Status CheckComplete() const;

 private:
  struct Landing {
    ReplyPayload payload;
    ChunkGrid grid;
  };

  mutable absl::Mutex mutex_;
  std::vector<Landing> landings_ ABSL_GUARDED_BY(mutex_);
  int64_t missing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
