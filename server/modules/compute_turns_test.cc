#include "server/modules/compute_turns.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/keep/call_pace.h"
#include "server/modules/device_turns.h"

namespace attnd {
namespace {

double test_seconds = 0;  // what the turns' clock says
double TestNow() { return test_seconds; }

class Turns : public ::testing::Test {
 protected:
  Turns() { test_seconds = 100; }
  ~Turns() override { Join(); }

  // Has a call wait on a thread of its own, until its turn; then it computes so long and ends.
  void Wait(const std::string& caller, double seconds = 0,
            absl::Time deadline = absl::InfiniteFuture(), const std::string& name = "") {
    const int before = turns_.waiting();
    threads_.emplace_back([=, this] {
      ComputeTurns::Place place(turns_, {.caller = caller, .deadline = deadline});
      EXPECT_TRUE(place.Take());
      test_seconds += seconds;
      order_.push_back(name.empty() ? caller : name);  // the turn guards it
    });
    while (turns_.waiting() == before) std::this_thread::yield();
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  ComputeTurns turns_{&TestNow};
  std::vector<std::string> order_;
  std::vector<std::thread> threads_;
};

TEST_F(Turns, GoToTheCallerThatHasHadTheLeast) {
  auto held = std::make_unique<ComputeTurns::Place>(turns_, TurnWish{.caller = "a"});
  ASSERT_TRUE(held->Take());
  Wait("a", 1);
  Wait("b", 4);
  Wait("b", 4);
  Wait("c", 1);
  Wait("a", 1);
  test_seconds += 1;  // a has had 1, b and c 0
  held.reset();
  Join();
  EXPECT_EQ(order_, (std::vector<std::string>{"b", "c", "a", "a", "b"}));
}

TEST_F(Turns, OfOneCallerGoToTheCallThatIsDueFirst) {
  auto held = std::make_unique<ComputeTurns::Place>(turns_, TurnWish{.caller = "a"});
  ASSERT_TRUE(held->Take());
  const absl::Time now = absl::Now();
  Wait("a", 0, now + absl::Hours(2), "late");
  Wait("a", 0, now + absl::Hours(1), "soon");
  held.reset();
  Join();
  EXPECT_EQ(order_, (std::vector<std::string>{"soon", "late"}));
}

TEST_F(Turns, GiveNoCreditForTimeWithoutCalls) {
  ComputeTurns::Place always(turns_, {.caller = "a"});
  ASSERT_TRUE(always.Take());
  test_seconds += 50;
  always.Give();
  always.TakeAgain();
  for (int n = 0; n < 3; ++n) Wait("b", 1);  // begins where a is: at 50
  Wait("a");
  test_seconds += 1.5;
  always.Give();
  Join();
  EXPECT_EQ(order_, (std::vector<std::string>{"b", "b", "a", "b"}));
}

TEST_F(Turns, AreWantedBackAfterASliceByACallerThatIsBehind) {
  ComputeTurns::Place longest(turns_, {.caller = "a"});
  ASSERT_TRUE(longest.Take());
  test_seconds += 1;
  EXPECT_FALSE(longest.IsWanted());
  Wait("a");
  EXPECT_FALSE(longest.IsWanted());  // its own caller's next call waits until it ends
  Wait("b", 0.5);
  EXPECT_TRUE(longest.IsWanted());
  longest.Give();
  longest.TakeAgain();
  EXPECT_EQ(order_.front(), "b");
  EXPECT_FALSE(longest.IsWanted());  // the turn has just begun
  test_seconds += 1;
  EXPECT_FALSE(longest.IsWanted());  // nobody else is left
  EXPECT_EQ(longest.computed_seconds(), 2);
}

TEST_F(Turns, EndAWaitThatIsStoppedOrTooLong) {
  ComputeTurns::Place held(turns_, {.caller = "a"});
  ASSERT_TRUE(held.Take());
  ComputeTurns::Place late(turns_,
                           {.caller = "a", .deadline = absl::Now() + absl::Milliseconds(5)});
  EXPECT_FALSE(late.Take());
  std::stop_source stop;
  std::thread caller([&] {
    ComputeTurns::Place stopped(turns_, {.caller = "b", .stop = stop.get_token()});
    EXPECT_FALSE(stopped.Take());
  });
  while (turns_.waiting() < 1) std::this_thread::yield();
  stop.request_stop();
  caller.join();
  EXPECT_EQ(turns_.waiting(), 0);
}

TEST_F(Turns, CountAsStuckSomeTimeAfterTheDeadlineOfTheCallThatHasTheDevice) {
  const absl::Time deadline = absl::Now() + absl::Hours(1);
  ComputeTurns::Place place(turns_, {.caller = "a", .deadline = deadline});
  EXPECT_EQ(turns_.stuck_at(), absl::InfiniteFuture());
  ASSERT_TRUE(place.Take());
  EXPECT_EQ(turns_.stuck_at(), deadline + kStuckAfter);
  place.Give();
  EXPECT_EQ(turns_.stuck_at(), absl::InfiniteFuture());
}

TEST_F(Turns, OfACallThatIsFinishedAfterItsDeadlineCountFromTheirBeginning) {
  ComputeTurns::Place place(turns_, {.caller = "a", .deadline = absl::Now() - absl::Hours(1)});
  place.TakeAgain();
  EXPECT_GT(turns_.stuck_at(), absl::Now());
}

TEST_F(Turns, TellHowMuchWorkIsLeft) {
  EXPECT_EQ(turns_.QueueSeconds(), 0);
  EXPECT_EQ(turns_.SecondsUntilDone("a", 2), 2);
  ComputeTurns::Place held(turns_, {.caller = "a", .seconds = 10});
  ASSERT_TRUE(held.Take());
  const ComputeTurns::Place other(turns_, {.caller = "b", .seconds = 3});
  EXPECT_EQ(turns_.QueueSeconds(), 13);
  test_seconds += 4;
  EXPECT_EQ(turns_.QueueSeconds(), 9);
  EXPECT_EQ(turns_.SecondsUntilDone("a", 1), 6 + 1 + 3);
  EXPECT_EQ(turns_.SecondsUntilDone("b", 1), 3 + 1 + 4);  // of a's 6 as much as its own
  EXPECT_EQ(turns_.SecondsUntilDone("c", 1), 1 + 1 + 1);
  test_seconds += 100;  // longer than estimated
  EXPECT_EQ(turns_.QueueSeconds(), 3);
}

TEST_F(Turns, OfSeveralDevicesAreGivenUpAndTakenTogether) {
  ComputeTurns second(&TestNow);
  DeviceTurns wide({&turns_, &second}, {.caller = "a"});
  ASSERT_TRUE(wide.Take());
  std::vector<std::string> steps;
  std::thread other([&] {
    DeviceTurns narrow({&second}, {.caller = "b"});
    EXPECT_TRUE(narrow.Take());
    steps.push_back("narrow");
  });
  while (second.waiting() < 1) std::this_thread::yield();
  EXPECT_FALSE(wide.IsWanted());
  test_seconds += 1;
  EXPECT_TRUE(wide.IsWanted());
  wide.Yield();
  steps.push_back("wide");
  other.join();
  EXPECT_EQ(steps, (std::vector<std::string>{"narrow", "wide"}));
  EXPECT_EQ(wide.computed(), absl::Seconds(1));
}

TEST(CallPace, FollowsTheCallsOfItsKind) {
  CallPace pace;
  EXPECT_EQ(pace.SecondsFor(PacedCall::kForward, 8), 0);
  pace.Took(PacedCall::kForward, 4, 2);
  EXPECT_EQ(pace.SecondsFor(PacedCall::kForward, 8), 4);
  EXPECT_EQ(pace.SecondsFor(PacedCall::kBackward, 8), 0);
  for (int n = 0; n < 50; ++n) pace.Took(PacedCall::kForward, 4, 4);
  EXPECT_NEAR(pace.SecondsFor(PacedCall::kForward, 8), 8, 1e-3);
}

}  // namespace
}  // namespace attnd
