// TransferProgress: what one call's peer has moved since the call began to wait for it, and whether
// that is enough: some byte within `idle`; after that time min_bytes_per_second on average; and no
// call longer than `longest`.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

struct TransferLimits {
  absl::Duration idle = absl::Seconds(10);
  int64_t min_bytes_per_second = int64_t{64} << 10;
  absl::Duration longest = absl::Minutes(10);  // a call's time in all, while it sends or receives
};

// Threads: Moved and Check any, the others the call's reactions.
class TransferProgress {
 public:
  explicit TransferProgress(const Clock& clock) : clock_(clock) {}
  // Once, before anything else.
  void CallBegan(absl::Time now) { call_began_ = now; }
  // The call waits for its peer from now on.
  void Begin();
  void Moved(int64_t bytes);
  // The call does not wait for its peer.
  void Pause() { begin_nanos_ = kPaused; }

  // OK, or DEADLINE_EXCEEDED with reason STREAM_IDLE, STREAM_TOO_SLOW or
  // DEADLINE_EXCEEDED_IN_TRANSFER.
  absl::Status Check(const TransferLimits& limits) const;

 private:
  static constexpr int64_t kPaused = INT64_MAX;
  const Clock& clock_;  // outlives the slices of the reply, which tell of what has moved
  absl::Time call_began_ = absl::InfiniteFuture();
  std::atomic<int64_t> begin_nanos_{kPaused};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> moved_nanos_{0};
};

}  // namespace attnd
