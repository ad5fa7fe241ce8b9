#include "server/call/transfer_progress.h"

#include <gtest/gtest.h>

#include <string>

#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr TransferLimits kLimits{
    .idle = absl::Seconds(10), .min_bytes_per_second = 1000, .longest = absl::Seconds(2000)};
const absl::Time kStart = absl::UnixEpoch() + absl::Seconds(100);

class TransferProgressTest : public testing::Test {
 protected:
  TransferProgressTest() { progress_.CallBegan(kStart); }
  void At(double seconds) { clock_.Advance(kStart + absl::Seconds(seconds) - clock_.Now()); }
  std::string ReasonAt(double seconds) {
    At(seconds);
    const absl::Status status = progress_.Check(kLimits);
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDeadlineExceeded);
    return ReasonOf(status);
  }

  FakeClock clock_{kStart};
  TransferProgress progress_{clock_};
};

TEST_F(TransferProgressTest, IsFineUntilNothingHasMovedForTheIdleTime) {
  progress_.Begin();
  EXPECT_EQ(ReasonAt(9), "");
  progress_.Moved(1 << 20);
  EXPECT_EQ(ReasonAt(19), "");
  EXPECT_EQ(ReasonAt(19.001), reason::kStreamIdle);
}

TEST_F(TransferProgressTest, IsTooSlowBelowTheRateOnceTheIdleTimeHasPassed) {
  progress_.Begin();
  for (int second = 1; second <= 16; ++second) {
    EXPECT_EQ(ReasonAt(second), "") << second;
    progress_.Moved(400);
  }
  EXPECT_EQ(ReasonAt(16.3), "");  // 6300 bytes are due of 6400
  EXPECT_EQ(ReasonAt(16.5), reason::kStreamTooSlow);
}

TEST_F(TransferProgressTest, CountsFromWhenItIsWaitedFor) {
  progress_.Begin();
  progress_.Moved(1 << 30);
  At(1);
  progress_.Begin();
  for (int second = 2; second <= 20; ++second) {
    At(second);
    progress_.Moved(400);
  }
  EXPECT_EQ(ReasonAt(20), reason::kStreamTooSlow);
}

TEST_F(TransferProgressTest, IsFineWhileTheCallDoesNotWait) {
  EXPECT_EQ(ReasonAt(1000), "");
  progress_.Begin();
  progress_.Pause();
  EXPECT_EQ(ReasonAt(1100), "");
  progress_.Begin();
  EXPECT_EQ(ReasonAt(1101), "");
}

TEST_F(TransferProgressTest, EndsWithTheLongestTimeOfACallHoweverMuchMoves) {
  At(1995);
  progress_.Begin();
  progress_.Moved(1 << 30);
  EXPECT_EQ(ReasonAt(2000), "");
  progress_.Moved(1 << 30);
  EXPECT_EQ(ReasonAt(2000.001), reason::kDeadlineExceededTransfer);
}

}  // namespace
}  // namespace attnd
