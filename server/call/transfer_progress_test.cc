#include "server/call/transfer_progress.h"

#include <gtest/gtest.h>

#include <string>

#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr TransferLimits kLimits{
    .idle = absl::Seconds(10), .min_bytes_per_second = 1000, .longest = absl::Seconds(2000)};
const absl::Time kStart = absl::UnixEpoch() + absl::Seconds(100);

std::string ReasonAfter(TransferProgress& progress, double seconds) {
  absl::Status status = progress.Check(kLimits, kStart + absl::Seconds(seconds));
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDeadlineExceeded);
  return ReasonOf(status);
}

TEST(TransferProgress, IsFineUntilNothingHasMovedForTheIdleTime) {
  TransferProgress progress;
  progress.CallBegan(kStart);
  progress.Begin(kStart);
  EXPECT_EQ(ReasonAfter(progress, 10), "");
  EXPECT_EQ(ReasonAfter(progress, 10.001), reason::kStreamIdle);
  progress.Moved(1 << 20);
  EXPECT_EQ(ReasonAfter(progress, 11), "");  // seen now
  EXPECT_EQ(ReasonAfter(progress, 21), "");
  EXPECT_EQ(ReasonAfter(progress, 21.001), reason::kStreamIdle);
}

TEST(TransferProgress, IsTooSlowBelowTheRateOnceTheIdleTimeHasPassed) {
  TransferProgress progress;
  progress.CallBegan(kStart);
  progress.Begin(kStart);
  for (int second = 1; second <= 17; ++second) {
    progress.Moved(400);
    EXPECT_EQ(ReasonAfter(progress, second), "") << second;
  }
  EXPECT_EQ(ReasonAfter(progress, 16.7), "");  // 6700 bytes are due of 6800
  EXPECT_EQ(ReasonAfter(progress, 16.9), reason::kStreamTooSlow);
}

TEST(TransferProgress, CountsFromWhenItIsWaitedFor) {
  TransferProgress progress;
  progress.CallBegan(kStart);
  progress.Begin(kStart);
  progress.Moved(1 << 30);
  progress.Begin(kStart + absl::Seconds(1));
  for (int second = 2; second <= 20; ++second) {
    progress.Moved(400);
    ReasonAfter(progress, second);
  }
  EXPECT_EQ(ReasonAfter(progress, 20), reason::kStreamTooSlow);
}

TEST(TransferProgress, IsFineWhileTheCallDoesNotWait) {
  TransferProgress progress;
  progress.CallBegan(kStart);
  EXPECT_EQ(ReasonAfter(progress, 3000), "");
  progress.Begin(kStart);
  progress.Pause();
  EXPECT_EQ(ReasonAfter(progress, 3000), "");
  progress.Begin(kStart + absl::Seconds(1000));
  EXPECT_EQ(ReasonAfter(progress, 1001), "");
}

TEST(TransferProgress, EndsWithTheLongestTimeOfACallHoweverMuchMoves) {
  TransferProgress progress;
  progress.CallBegan(kStart);
  progress.Begin(kStart + absl::Seconds(1995));
  progress.Moved(1 << 30);
  EXPECT_EQ(ReasonAfter(progress, 2000), "");
  progress.Moved(1 << 30);
  EXPECT_EQ(ReasonAfter(progress, 2000.001), reason::kDeadlineExceededTransfer);
}

}  // namespace
}  // namespace attnd
