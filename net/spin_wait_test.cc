#include "net/spin_wait.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {
namespace {

constexpr absl::Duration kShort = SpinWait::kShort;

// Gives what comes after `wait`; a look and a moment take a tenth of kShort.
struct Waiter {
  bool Wait(absl::Duration wait, bool comes = true) {
    const absl::Time at = clock.Now() + wait;
    auto look = [&] {
      ++looks;
      clock.Advance(kShort / 10);
      return comes && clock.Now() >= at;
    };
    auto sleep = [&] {
      ++sleeps;
      clock.Advance(std::max(absl::ZeroDuration(), at - clock.Now()));
      return comes;
    };
    return waits.Wait(alone, look, sleep);
  }
  int LooksOf(absl::Duration wait, bool comes = true) {
    const int before = looks;
    EXPECT_EQ(Wait(wait, comes), comes);
    return looks - before;
  }

  explicit Waiter(int processors = 2) : waits(processors, clock) {}
  FakeClock clock;
  SpinWait waits;
  bool alone = true;
  int looks = 0, sleeps = 0;
};

TEST(SpinWait, LooksOnceAWaitWasShort) {
  Waiter waiter;
  EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
  EXPECT_EQ(waiter.sleeps, 1);
  EXPECT_EQ(waiter.LooksOf(kShort / 2), 5);
  EXPECT_EQ(waiter.LooksOf(kShort / 5), 2);
  EXPECT_EQ(waiter.sleeps, 1);
}

TEST(SpinWait, SleepsThroughLongWaits) {
  Waiter waiter;
  for (int n = 0; n < 100; ++n) EXPECT_EQ(waiter.LooksOf(2 * kShort), 0);
  EXPECT_EQ(waiter.sleeps, 100);
}

// Looks for no longer than that, then sleeps; and next time the wait before has been long.
TEST(SpinWait, LooksForAWhileOnly) {
  Waiter waiter;
  waiter.Wait(kShort / 2);
  EXPECT_EQ(waiter.LooksOf(10 * kShort), 10);
  EXPECT_EQ(waiter.sleeps, 2);
  EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
}

// Nothing has come: as a wait that was too long.
TEST(SpinWait, AWaitInVainIsNotShort) {
  Waiter waiter;
  for (int n = 0; n < 4; ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2, false), 0);
}

// Short waits that have to pass: 1, after looks in vain 2, 4, 8, ..., and half after each that was
// not.
TEST(SpinWait, EachLookInVainDoublesTheShortWaitsBeforeTheNext) {
  Waiter waiter;
  waiter.Wait(kShort / 2);
  for (int wanted : {2, 4, 8, 16}) {
    EXPECT_GT(waiter.LooksOf(10 * kShort), 0);
    for (int n = 0; n < wanted; ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2), 0) << wanted;
  }
  for (int n = 0; n < 4; ++n) EXPECT_GT(waiter.LooksOf(kShort / 2), 0);
  EXPECT_GT(waiter.LooksOf(10 * kShort), 0);
  for (int n = 0; n < 2; ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
  EXPECT_GT(waiter.LooksOf(kShort / 2), 0);
}

TEST(SpinWait, DoublesUpToAMost) {
  constexpr int kMost = SpinWait::kMaxWanted;
  Waiter waiter;
  for (int wanted = 1; wanted <= 4 * kMost; wanted *= 2) {
    for (int n = 0; n < std::min(wanted, kMost); ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
    EXPECT_GT(waiter.LooksOf(10 * kShort), 0) << wanted;
  }
}

TEST(SpinWait, OneProcessorNeverLooks) {
  Waiter waiter(1);
  for (int n = 0; n < 4; ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
}

TEST(SpinWait, OnlyOneThatIsAloneLooks) {
  Waiter waiter;
  waiter.Wait(kShort / 2);
  waiter.alone = false;
  for (int n = 0; n < 4; ++n) EXPECT_EQ(waiter.LooksOf(kShort / 2), 0);
}

}  // namespace
}  // namespace attnd
