#include "client/modules/backward_turns.h"

#include <gtest/gtest.h>

#include <future>
#include <stop_token>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace attnd {
namespace {

const absl::Time kLate = absl::Now() + absl::Minutes(1);

TEST(BackwardTurns, BeginInTheOrderInWhichTheyWereReserved) {
  BackwardTurns turns;
  std::vector<uint64_t> reserved, begun;
  for (int n = 0; n < 4; ++n) reserved.push_back(turns.Reserve());
  std::vector<std::jthread> threads;
  for (auto turn = reserved.rbegin(); turn != reserved.rend(); ++turn) {
    threads.emplace_back([&turns, &begun, turn = *turn] {
      ASSERT_TRUE(turns.Await(turn, kLate, {}).ok());
      begun.push_back(turn);
      turns.Begin(turn);
    });
  }
  threads.clear();
  EXPECT_EQ(begun, reserved);
}

TEST(BackwardTurns, WaitNoLongerThanTheDeadline) {
  BackwardTurns turns;
  turns.Reserve();
  const uint64_t second = turns.Reserve();
  EXPECT_TRUE(absl::IsDeadlineExceeded(turns.Await(second, absl::Now(), {})));
}

TEST(BackwardTurns, EndWithOneBeforeThemThatIsGivenUp) {
  BackwardTurns turns;
  const uint64_t first = turns.Reserve(), second = turns.Reserve(), third = turns.Reserve();
  turns.Begin(first);
  turns.Begin(second);
  const std::stop_token stops_first = *turns.Try(first, kLate, {});
  const std::stop_token stops_second = *turns.Try(second, kLate, {});
  std::future<absl::Status> waits =
      std::async(std::launch::async, [&] { return turns.Await(third, kLate, {}); });
  turns.GiveUp(second);
  EXPECT_FALSE(stops_first.stop_requested());
  EXPECT_TRUE(stops_second.stop_requested());
  EXPECT_TRUE(turns.Check(first).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(turns.Try(second, kLate, {}).status()));
  waits.wait();
  EXPECT_TRUE(absl::IsFailedPrecondition(turns.Check(third)));
  const uint64_t later = turns.Reserve();
  EXPECT_TRUE(turns.Await(later, kLate, {}).ok());
}

TEST(BackwardTurns, OfWhichOneNeverBeganEndForThoseThatWait) {
  BackwardTurns turns;
  const uint64_t first = turns.Reserve(), second = turns.Reserve();
  std::future<absl::Status> waits =
      std::async(std::launch::async, [&] { return turns.Await(second, kLate, {}); });
  turns.GiveUp(first);
  EXPECT_TRUE(absl::IsFailedPrecondition(waits.get()));
}

TEST(BackwardTurns, TellWhetherTheCallerHasGivenThemUp) {
  BackwardTurns turns;
  turns.Reserve();
  const uint64_t second = turns.Reserve();
  std::stop_source stop;
  CallOptions options;
  options.stop = stop.get_token();
  const std::stop_callback give_up(options.stop, [&] { turns.GiveUp(second); });
  std::future<absl::Status> waits =
      std::async(std::launch::async, [&] { return turns.Await(second, kLate, options); });
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(waits.get()));
}

TEST(BackwardTurns, StayWhereALaterOneOrOneThatHasEndedIsGivenUp) {
  BackwardTurns turns;
  const uint64_t first = turns.Reserve(), second = turns.Reserve(), third = turns.Reserve();
  turns.Begin(first);
  turns.End(first);
  turns.GiveUp(first);
  turns.GiveUp(third);
  EXPECT_TRUE(turns.Await(second, kLate, {}).ok());
}

TEST(BackwardTurns, AreStoppedByAPauseAndTriedAgainAfterIt) {
  BackwardTurns turns;
  const uint64_t turn = turns.Reserve();
  const std::stop_token before = *turns.Try(turn, kLate, {});
  std::future<std::stop_token> after;
  {
    const BackwardTurns::Pause pause(turns);
    EXPECT_TRUE(before.stop_requested());
    EXPECT_TRUE(absl::IsDeadlineExceeded(
        turns.Try(turn, absl::Now() + absl::Milliseconds(1), {}).status()));
    after = std::async(std::launch::async, [&] { return *turns.Try(turn, kLate, {}); });
  }
  EXPECT_FALSE(after.get().stop_requested());
}

}  // namespace
}  // namespace attnd
