#include "base/periodic.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "base/clock.h"

namespace attnd {
namespace {

TEST(Periodic, WorksAgainAndAgain) {
  std::atomic<int> runs{0};
  Periodic periodic(absl::Milliseconds(1), [&] { ++runs; });
  while (runs < 3) std::this_thread::yield();
}

TEST(Periodic, SeesWhatAFakeClockSays) {
  FakeClock clock;
  const absl::Time due = clock.Now() + absl::Hours(1);
  std::atomic<int> looks{0}, runs{0};
  Periodic periodic(absl::Milliseconds(1), [&] {
    if (clock.Now() >= due) ++runs;
    ++looks;
  });
  while (looks < 3) std::this_thread::yield();
  EXPECT_EQ(runs, 0);
  clock.Advance(absl::Hours(1));
  while (runs == 0) std::this_thread::yield();
}

TEST(Periodic, EndsWithoutWaitingOutItsPeriod) {
  std::atomic<int> runs{0};
  {
    Periodic periodic(absl::Hours(1), [&] { ++runs; });
  }
  EXPECT_EQ(runs, 0);
}

TEST(Periodic, WaitsForTheWorkThatIsUnderWay) {
  absl::Notification began;
  std::atomic<bool> ended{false};
  {
    Periodic periodic(absl::Milliseconds(1), [&] {
      if (began.HasBeenNotified()) return;
      began.Notify();
      for (int n = 0; n < 1000; ++n) std::this_thread::yield();
      ended = true;
    });
    began.WaitForNotification();
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace attnd
