#include "server/modules/compute_turns.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

TEST(ComputeTurns, GivesCallersTheirTurnsInRotation) {
  ComputeTurns turns;
  std::optional<ComputeTurns::Turn> held;
  held.emplace(turns.Take("a", {}, absl::InfiniteFuture()));
  absl::Mutex mutex;
  std::vector<std::string> order;
  std::vector<std::thread> threads;
  auto call = [&](const std::string& caller, int waiting) {
    threads.emplace_back([&, caller] {
      const ComputeTurns::Turn turn = turns.Take(caller, {}, absl::InfiniteFuture());
      EXPECT_TRUE(turn);
      absl::MutexLock lock(&mutex);
      order.push_back(caller);
    });
    while (turns.waiting() < waiting) std::this_thread::yield();
  };
  call("a", 1);
  call("a", 2);
  call("a", 3);
  call("b", 4);
  held.reset();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<std::string>{"b", "a", "a", "a"}));
}

TEST(ComputeTurns, CountAsStuckSomeTimeAfterTheDeadlineOfTheCallThatHasTheDevice) {
  ComputeTurns turns;
  const absl::Time deadline = absl::Now() + absl::Hours(1);
  EXPECT_EQ(turns.stuck_at(), absl::InfiniteFuture());
  {
    const ComputeTurns::Turn held = turns.Take("a", {}, deadline);
    EXPECT_EQ(turns.stuck_at(), deadline + kStuckAfter);
  }
  EXPECT_EQ(turns.stuck_at(), absl::InfiniteFuture());
}

TEST(ComputeTurns, EndsAWaitThatIsStoppedOrTooLong) {
  ComputeTurns turns;
  const ComputeTurns::Turn held = turns.Take("a", {}, absl::InfiniteFuture());
  EXPECT_FALSE(turns.Take("a", {}, absl::Now() + absl::Milliseconds(5)));
  std::stop_source stop;
  std::thread caller(
      [&] { EXPECT_FALSE(turns.Take("b", stop.get_token(), absl::InfiniteFuture())); });
  while (turns.waiting() < 1) std::this_thread::yield();
  stop.request_stop();
  caller.join();
  EXPECT_EQ(turns.waiting(), 0);
}

}  // namespace
}  // namespace attnd
