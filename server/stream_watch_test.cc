#include "server/stream_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "server/status_details.h"

namespace attnd {
namespace {

constexpr StreamLimits kLimits{.idle = absl::Seconds(10), .min_bytes_per_second = 1000};
const absl::Time kStart = absl::UnixEpoch() + absl::Seconds(100);

std::string ReasonAfter(const StreamProgress& progress, double seconds) {
  absl::Status status = progress.Check(kLimits, kStart + absl::Seconds(seconds));
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kDeadlineExceeded);
  return ReasonOf(status);
}

TEST(StreamProgress, IsFineUntilNothingHasMovedForTheIdleTime) {
  StreamProgress progress;
  progress.Begin(kStart);
  EXPECT_EQ(ReasonAfter(progress, 10), "");
  EXPECT_EQ(ReasonAfter(progress, 10.001), reason::kStreamIdle);
  progress.Moved(1 << 20, kStart + absl::Seconds(9));
  EXPECT_EQ(ReasonAfter(progress, 19), "");
  EXPECT_EQ(ReasonAfter(progress, 19.001), reason::kStreamIdle);
}

TEST(StreamProgress, IsTooSlowBelowTheRateOnceTheIdleTimeHasPassed) {
  StreamProgress progress;
  progress.Begin(kStart);
  for (int second = 1; second <= 20; ++second) {
    progress.Moved(400, kStart + absl::Seconds(second));
  }
  EXPECT_EQ(ReasonAfter(progress, 17.9), "");  // 7900 bytes were due of 8000
  EXPECT_EQ(ReasonAfter(progress, 18.1), reason::kStreamTooSlow);
}

TEST(StreamProgress, CountsFromWhenItIsWaitedFor) {
  StreamProgress progress;
  progress.Begin(kStart);
  progress.Moved(1 << 30, kStart + absl::Seconds(1));
  progress.Begin(kStart + absl::Seconds(1));
  for (int second = 2; second <= 20; ++second) {
    progress.Moved(400, kStart + absl::Seconds(second));
  }
  EXPECT_EQ(ReasonAfter(progress, 20), reason::kStreamTooSlow);
}

TEST(StreamProgress, IsFineWhileNobodyWaits) {
  StreamProgress progress;
  EXPECT_EQ(ReasonAfter(progress, 1000), "");
  progress.Begin(kStart);
  progress.Pause();
  EXPECT_EQ(ReasonAfter(progress, 1000), "");
  progress.Begin(kStart + absl::Seconds(1000));
  EXPECT_EQ(ReasonAfter(progress, 1001), "");
}

class CountingStream final : public WatchedStream {
 public:
  void Cut(const absl::Status&) override { ++cuts_; }
  int cuts() const { return cuts_; }

 private:
  std::atomic<int> cuts_{0};
};

TEST(StreamWatch, CutsTheSilentAndNotTheBusy) {
  FakeClock clock(kStart);
  StreamWatch watch({.idle = absl::Milliseconds(20), .min_bytes_per_second = 0}, clock);
  CountingStream silent, other, busy, waits_for_nobody;
  silent.progress().Begin(kStart);
  other.progress().Begin(kStart);
  busy.progress().Begin(kStart);
  busy.progress().Moved(1, kStart + absl::Seconds(1));
  for (WatchedStream* stream :
       std::initializer_list<WatchedStream*>{&silent, &other, &busy, &waits_for_nobody}) {
    watch.Add(*stream);
  }
  clock.Advance(absl::Seconds(1));
  while (silent.cuts() == 0) std::this_thread::yield();
  watch.Remove(silent);
  const int cuts = silent.cuts(), others = other.cuts();
  while (other.cuts() < others + 2) std::this_thread::yield();
  EXPECT_EQ(silent.cuts(), cuts);  // nothing after Remove
  for (WatchedStream* stream :
       std::initializer_list<WatchedStream*>{&other, &busy, &waits_for_nobody}) {
    watch.Remove(*stream);
  }
  EXPECT_EQ(busy.cuts(), 0);
  EXPECT_EQ(waits_for_nobody.cuts(), 0);
}

}  // namespace
}  // namespace attnd
