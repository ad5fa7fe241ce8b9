#include "server/admission/deadline_order.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace attnd {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);
absl::Time In(double seconds) { return kNow + absl::Seconds(seconds); }

// Calls with deadlines at which they are due.
DeadlineOrder OrderOf(const std::vector<std::pair<double, double>>& due_and_seconds) {
  DeadlineOrder order;
  uint64_t number = 0;
  for (const auto& [due, seconds] : due_and_seconds) {
    order.Add({In(due), ++number}, In(due), seconds);
  }
  return order;
}

TEST(DeadlineOrder, CountsAheadWhatRunsAndWhatIsDueNoLater) {
  DeadlineOrder order = OrderOf({{9, 4}, {1, 0.25}, {2, 0.5}});
  EXPECT_DOUBLE_EQ(order.For(In(0.5), 0.1, {}, kNow).ahead_seconds, 0);
  EXPECT_DOUBLE_EQ(order.For(In(1), 0.1, {}, kNow).ahead_seconds, 0.25);
  EXPECT_DOUBLE_EQ(order.For(In(3), 0.1, {}, kNow).ahead_seconds, 0.75);
  order.Start({In(9), 1});
  EXPECT_DOUBLE_EQ(order.For(In(3), 0.1, {}, kNow).ahead_seconds, 4.75);
  order.Remove({DeadlineOrder::kRunning, 1});
  order.Remove({In(1), 2});
  EXPECT_DOUBLE_EQ(order.For(In(3), 0.1, {}, kNow).ahead_seconds, 0.5);
  order.Remove({In(2), 3});
  EXPECT_TRUE(order.empty());
}

TEST(DeadlineOrder, CountsOthersWorkUpToItsShareAtTheDevicesPace) {
  const DeadlineOrder order = OrderOf({{1, 0.5}});
  EXPECT_DOUBLE_EQ(order.For(In(2), 0.1, {.others_seconds = 9, .weights = 2}, kNow).ahead_seconds,
                   2 * 0.6 - 0.1);
  EXPECT_DOUBLE_EQ(order.For(In(2), 0.1, {.others_seconds = 0.2, .weights = 2}, kNow).ahead_seconds,
                   0.7);
  EXPECT_DOUBLE_EQ(order.For(In(2), 0.1, {.pace = 3}, kNow).ahead_seconds, 1.5);
}

TEST(DeadlineOrder, TellsWhetherANewCallBreaksTheDeadlineOfOneThatIsDueLater) {
  struct Case {
    const char* name;
    std::vector<std::pair<double, double>> calls;  // due, seconds
    double due, seconds;
    bool breaks;
  };
  const Case cases[] = {
      {"time for both", {{1, 0.5}}, 0.9, 0.4, false},
      {"no time for both", {{1, 0.5}}, 0.9, 0.5, true},  // with the margin
      {"the other is due first", {{1, 0.5}}, 1.1, 0.5, false},
      {"the second next", {{1, 0.1}, {2, 1.5}}, 0.9, 0.4, true},
      {"late without the new call", {{1, 1.5}}, 0.9, 0.4, false},
      {"past its deadline", {{-1, 0.5}, {2, 0.5}}, 1, 0.4, false},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    EXPECT_EQ(OrderOf(one.calls).For(In(one.due), one.seconds, {}, kNow).breaks_another,
              one.breaks);
  }
}

TEST(DeadlineOrder, FeelsThePressureOfTheTightestOfSeveralWaitingCalls) {
  DeadlineOrder order = OrderOf({{1, 0.1}, {1, 0.1}, {2, 1}});
  EXPECT_EQ(order.For(In(5), 0.1, {}, kNow).pressure, 0);  // too few
  order.Add({In(10), 4}, In(10), 0.1);
  EXPECT_NEAR(order.For(In(5), 0.1, {}, kNow).pressure, DeadlineOrder::kQueueMargin * 1.2 / 2,
              1e-9);
  order.Start({In(2), 3});
  EXPECT_EQ(order.For(In(5), 0.1, {}, kNow).pressure, 0);
}

}  // namespace
}  // namespace attnd
