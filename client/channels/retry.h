// When a failed shard is tried again, and after how long. Pure but for the budget's count.
#pragma once

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/types/client_options.h"

namespace attnd {

struct FailedAttempt {
  absl::Status status;
  bool is_waited_for = false;                  // IsWaitedFor (error_class.h)
  int attempts = 1;                            // of this shard so far, this one included
  bool other_address = false;                  // there is one that the shard has not tried
  bool retry_forbidden = false;                // a negative or malformed grpc-retry-pushback-ms
  std::optional<absl::Duration> server_delay;  // grpc-retry-pushback-ms, else RetryInfo
};

// RetryBudget: a token bucket over all calls of one client, so that a server in trouble is not
// drowned in retries. Any thread.
class RetryBudget {
 public:
  explicit RetryBudget(const RetryPolicy& policy)
      : capacity_(policy.budget), per_success_(policy.budget_per_success), tokens_(policy.budget) {}
  // Takes a token for another attempt; false when there is none. A caller that waits needs none.
  bool TakeFor(const FailedAttempt& failed) { return failed.is_waited_for || Take(); }
  void OnSuccess();

 private:
  bool Take();

  const double capacity_, per_success_;
  absl::Mutex mutex_;
  double tokens_ ABSL_GUARDED_BY(mutex_);
};

// How long to wait before the next attempt; nothing when there is none. What a caller waits for is
// tried however often, unless the policy allows no retries.
// `uniform` is a random number in [0, 1).
std::optional<absl::Duration> RetryDelay(const RetryPolicy& policy, const FailedAttempt& attempt,
                                         double uniform);

}  // namespace attnd
