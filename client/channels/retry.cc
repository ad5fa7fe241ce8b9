#include "client/channels/retry.h"

#include <algorithm>

namespace attnd {

bool RetryBudget::Take() {
  absl::MutexLock lock(&mutex_);
  if (tokens_ < 1) return false;
  tokens_ -= 1;
  return true;
}

void RetryBudget::OnSuccess() {
  absl::MutexLock lock(&mutex_);
  tokens_ = std::min(capacity_, tokens_ + per_success_);
}

std::optional<absl::Duration> RetryDelay(const RetryPolicy& policy, const FailedAttempt& attempt,
                                         double uniform) {
  const bool passes = absl::IsUnavailable(attempt.status) || attempt.is_waited_for;
  if (!passes || attempt.retry_forbidden) return std::nullopt;
  const bool waits = attempt.is_waited_for && policy.max_attempts > 1;
  if (attempt.attempts >= policy.max_attempts && !waits) return std::nullopt;
  if (attempt.other_address) return absl::ZeroDuration();
  if (attempt.server_delay.has_value()) return *attempt.server_delay;
  absl::Duration most = policy.initial_backoff;
  for (int n = 1; n < attempt.attempts && most < policy.max_backoff; ++n) most *= 2;
  return uniform * std::min(most, policy.max_backoff);
}

}  // namespace attnd
