#include "client/cpp/shard_race.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

using Finish = ShardRace::Finish;

struct Runner {
  int cancelled = 0;
  void Enter(ShardRace& race) {
    race.Enter(this, [this] { ++cancelled; });
  }
};

TEST(ShardRace, IsWonByTheOnlyAttempt) {
  ShardRace race;
  Runner only;
  only.Enter(race);
  EXPECT_EQ(race.Leave(&only, true), Finish::kWon);
  EXPECT_FALSE(race.Join());
}

TEST(ShardRace, FailsWithTheOnlyAttempt) {
  ShardRace race;
  Runner only;
  only.Enter(race);
  EXPECT_EQ(race.Leave(&only, false), Finish::kFailed);
  EXPECT_FALSE(race.Join());
}

TEST(ShardRace, LetsOneMoreJoin) {
  ShardRace race;
  EXPECT_TRUE(race.Join());
  EXPECT_FALSE(race.Join());
}

TEST(ShardRace, CancelsTheOtherWhenOneHasAResult) {
  ShardRace race;
  Runner first, second;
  first.Enter(race);
  ASSERT_TRUE(race.Join());
  second.Enter(race);
  EXPECT_TRUE(race.Claim(&second));
  EXPECT_EQ(first.cancelled, 1);
  EXPECT_EQ(second.cancelled, 0);
  EXPECT_TRUE(race.Lost(&first));
  EXPECT_FALSE(race.Lost(&second));
  EXPECT_FALSE(race.Claim(&first));
  EXPECT_EQ(race.Leave(&first, true), Finish::kLost);
  EXPECT_EQ(race.Leave(&second, true), Finish::kWon);
}

TEST(ShardRace, CancelsOneThatEntersTooLate) {
  ShardRace race;
  Runner first, second;
  first.Enter(race);
  ASSERT_TRUE(race.Join());
  EXPECT_EQ(race.Leave(&first, true), Finish::kWon);
  second.Enter(race);
  EXPECT_EQ(second.cancelled, 1);
  EXPECT_EQ(race.Leave(&second, false), Finish::kLost);
}

TEST(ShardRace, LeavesTheShardToTheOtherWhenOneFails) {
  ShardRace race;
  Runner first, second;
  first.Enter(race);
  ASSERT_TRUE(race.Join());
  EXPECT_EQ(race.Leave(&first, false), Finish::kLost);
  second.Enter(race);
  EXPECT_EQ(race.Leave(&second, false), Finish::kFailed);
}

TEST(ShardRace, FailsWhenTheWinnerBreaksOffAndTheOtherIsCancelled) {
  ShardRace race;
  Runner first, second;
  first.Enter(race);
  ASSERT_TRUE(race.Join());
  second.Enter(race);
  EXPECT_TRUE(race.Claim(&first));
  EXPECT_EQ(race.Leave(&first, false), Finish::kLost);
  EXPECT_EQ(race.Leave(&second, false), Finish::kFailed);
}

}  // namespace
}  // namespace attnd
