#include "client/call/message_limits.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

using Answers = std::vector<absl::StatusOr<ServerLimits>>;

TEST(MessageLimits, AreAskedOnceForAllThatAreUnknown) {
  MessageLimits limits;
  std::vector<std::vector<int>> asked;
  auto ask = [&](const std::vector<int>& addresses) {
    asked.push_back(addresses);
    Answers answers;
    for (int a : addresses)
      answers.push_back(ServerLimits{.max_message_bytes = 100 + a, .streams = a > 0});
    return answers;
  };
  EXPECT_EQ(limits.OfAll({0, 1}, ask).max_message_bytes, 100);
  EXPECT_TRUE(limits.OfAll({1, 2}, ask).streams);
  EXPECT_EQ(limits.OfAll({1, 2}, ask).max_message_bytes, 101);
  EXPECT_EQ(asked, std::vector<std::vector<int>>({{0, 1}, {2}}));
  limits.Forget(absl::InvalidArgumentError(""));
  limits.OfAll({0, 1, 2}, ask);
  EXPECT_EQ(asked.size(), 2u);
  limits.Forget(absl::UnavailableError(""));
  limits.OfAll({0}, ask);
  EXPECT_EQ(asked.back(), std::vector<int>{0});
}

TEST(MessageLimits, DoNotCountAnAddressThatDoesNotAnswerWhileAnotherDoes) {
  MessageLimits limits;
  absl::StatusOr<ServerLimits> second = absl::UnavailableError("");
  auto ask = [&](const std::vector<int>& addresses) {
    Answers answers;
    for (int a : addresses) {
      answers.push_back(a == 0 ? absl::UnavailableError("") : second);
    }
    return answers;
  };
  EXPECT_FALSE(limits.OfAll({0, 1}, ask).streams);
  EXPECT_EQ(limits.OfAll({0, 1}, ask).max_message_bytes, ServerLimits().max_message_bytes);
  second = ServerLimits{.max_message_bytes = 1 << 30, .streams = true};
  EXPECT_TRUE(limits.OfAll({0, 1}, ask).streams);
  EXPECT_EQ(limits.OfAll({0, 1}, ask).max_message_bytes, 1 << 30);
}

}  // namespace
}  // namespace attnd
