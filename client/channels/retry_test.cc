#include "client/channels/retry.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

FailedAttempt Unavailable(int attempts) {
  return {.status = absl::UnavailableError("full"), .attempts = attempts};
}

TEST(RetryDelay, DoublesItsUpperBoundAndStopsAtTheLongest) {
  RetryPolicy policy{.max_attempts = 20};
  EXPECT_EQ(RetryDelay(policy, Unavailable(1), 0.5), absl::Milliseconds(25));
  EXPECT_EQ(RetryDelay(policy, Unavailable(2), 0.5), absl::Milliseconds(50));
  EXPECT_EQ(RetryDelay(policy, Unavailable(6), 0.5), absl::Milliseconds(800));
  EXPECT_EQ(RetryDelay(policy, Unavailable(7), 0.5), absl::Seconds(1));
  EXPECT_EQ(RetryDelay(policy, Unavailable(19), 0.5), absl::Seconds(1));
  EXPECT_EQ(RetryDelay(policy, Unavailable(19), 0.0), absl::ZeroDuration());
}

TEST(RetryDelay, HasNoneForOtherCodesOrAfterTheLastAttempt) {
  RetryPolicy policy;
  EXPECT_TRUE(RetryDelay(policy, Unavailable(2), 0).has_value());
  EXPECT_FALSE(RetryDelay(policy, Unavailable(3), 0).has_value());
  for (absl::Status status :
       {absl::ResourceExhaustedError(""), absl::DeadlineExceededError(""), absl::InternalError(""),
        absl::InvalidArgumentError(""), absl::CancelledError("")}) {
    EXPECT_FALSE(RetryDelay(policy, {.status = status}, 0).has_value()) << status;
  }
}

TEST(RetryDelay, WaitsForAQuotaAsLongAsTheServerSays) {
  FailedAttempt attempt{.status = absl::ResourceExhaustedError(""),
                        .is_waited_for = true,
                        .server_delay = absl::Milliseconds(100)};
  EXPECT_EQ(RetryDelay({}, attempt, 0.1), absl::Milliseconds(100));
  attempt.attempts = 300;
  EXPECT_EQ(RetryDelay({}, attempt, 0.1), absl::Milliseconds(100));
  EXPECT_FALSE(RetryDelay({.max_attempts = 1}, attempt, 0.1).has_value());
}

TEST(RetryDelay, GoesToAnotherAddressAtOnceAndElseWaitsAsLongAsTheServerSays) {
  FailedAttempt attempt = Unavailable(1);
  attempt.server_delay = absl::Seconds(7);
  EXPECT_EQ(RetryDelay({}, attempt, 0.1), absl::Seconds(7));
  attempt.other_address = true;
  EXPECT_EQ(RetryDelay({}, attempt, 0.1), absl::ZeroDuration());
  attempt.retry_forbidden = true;
  EXPECT_FALSE(RetryDelay({}, attempt, 0.1).has_value());
}

TEST(RetryBudget, GivesATokenBackForEnoughSuccesses) {
  RetryBudget budget(RetryPolicy{.budget = 2, .budget_per_success = 0.125});
  EXPECT_TRUE(budget.TakeFor(Unavailable(1)));
  EXPECT_TRUE(budget.TakeFor(Unavailable(1)));
  EXPECT_FALSE(budget.TakeFor(Unavailable(1)));
  for (int n = 0; n < 7; ++n) budget.OnSuccess();
  EXPECT_FALSE(budget.TakeFor(Unavailable(1)));
  budget.OnSuccess();
  EXPECT_TRUE(budget.TakeFor(Unavailable(1)));
  for (int n = 0; n < 100; ++n) budget.OnSuccess();  // never above its capacity
  EXPECT_TRUE(budget.TakeFor(Unavailable(1)));
  EXPECT_TRUE(budget.TakeFor(Unavailable(1)));
  EXPECT_FALSE(budget.TakeFor(Unavailable(1)));
  EXPECT_TRUE(budget.TakeFor({.status = absl::ResourceExhaustedError(""), .is_waited_for = true}));
}

}  // namespace
}  // namespace attnd
