#include "base/busy_thread.h"

#include <gtest/gtest.h>

#include <vector>

namespace attnd {
namespace {

constexpr int64_t kBusy = BusyThread::kBusy;

TEST(BusyThread, IsOneThatRunsWithoutASleepOnACoreOfItsOwn) {
  struct Case {
    const char* name;
    ThreadUse use;
    bool is_busy;
  };
  const Case cases[] = {
      {"long enough", {.at = kBusy, .sleeps = 0, .cpu = kBusy}, true},
      {"not yet", {.at = kBusy, .sleeps = 0, .cpu = kBusy - 1}, false},
      {"slept", {.at = kBusy, .sleeps = 1, .cpu = kBusy}, false},
      {"nearly a core", {.at = kBusy + kBusy / 4, .sleeps = 0, .cpu = kBusy}, true},
      {"shares its core", {.at = kBusy + kBusy / 4 + 1, .sleeps = 0, .cpu = kBusy}, false},
      {"shares it with one", {.at = 2 * kBusy, .sleeps = 0, .cpu = kBusy}, false},
  };
  for (const Case& c : cases) EXPECT_EQ(BusyThread({}).IsBusy(c.use), c.is_busy) << c.name;
}

// From when it last slept, or had run for so long.
TEST(BusyThread, IsLookedAtAnew) {
  BusyThread thread({.at = 10, .sleeps = 5, .cpu = 10});
  EXPECT_FALSE(thread.IsBusy({.at = 10 + kBusy / 2, .sleeps = 5, .cpu = 10 + kBusy / 2}));
  EXPECT_TRUE(thread.IsBusy({.at = 10 + kBusy, .sleeps = 5, .cpu = 10 + kBusy}));
  EXPECT_FALSE(thread.IsBusy({.at = 11 + kBusy, .sleeps = 5, .cpu = 11 + kBusy}));
  const int64_t waited = 100 * kBusy;
  EXPECT_FALSE(thread.IsBusy({.at = waited, .sleeps = 6, .cpu = 12 + kBusy}));
  EXPECT_TRUE(thread.IsBusy({.at = waited + kBusy, .sleeps = 6, .cpu = 12 + 2 * kBusy}));
  // A wait for the core counts until it has run for so long.
  EXPECT_FALSE(thread.IsBusy({.at = waited + 3 * kBusy, .sleeps = 6, .cpu = 12 + 3 * kBusy}));
  EXPECT_TRUE(thread.IsBusy({.at = waited + 4 * kBusy, .sleeps = 6, .cpu = 12 + 4 * kBusy}));
}

TEST(ThreadUse, CountsWhatTheCallerRuns) {
  const ThreadUse before = ThreadUse::OfTheCaller();
  ThreadUse now = before;
  while (now.cpu - before.cpu < kBusy) now = ThreadUse::OfTheCaller();
  EXPECT_GT(now.at, before.at);
  EXPECT_GE(now.sleeps, before.sleeps);
}

}  // namespace
}  // namespace attnd
