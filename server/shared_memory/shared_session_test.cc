#include "server/shared_memory/shared_session.h"

#include <gtest/gtest.h>

#include <vector>

namespace attnd {
namespace {

class SharedSessionTest : public testing::Test {
 protected:
  std::vector<uint64_t> ended_;
  SharedSession session_{[this](uint64_t use) { ended_.push_back(use); }};
};

TEST_F(SharedSessionTest, TellsOfTheEndOnlyWhenAskedFor) {
  ASSERT_TRUE(session_.Begin(1));
  ASSERT_TRUE(session_.Begin(2));
  EXPECT_EQ(session_.EndUse(2), SharedSession::End::kRuns);
  session_.Finish(1);
  EXPECT_TRUE(ended_.empty());
  session_.Finish(2);
  EXPECT_EQ(ended_, std::vector<uint64_t>{2});
}

TEST_F(SharedSessionTest, RefusesAUseThatRunsAndOneThatWasEndedBeforeItCame) {
  ASSERT_TRUE(session_.Begin(1));
  EXPECT_FALSE(session_.Begin(1));
  EXPECT_EQ(session_.EndUse(2), SharedSession::End::kEnded);
  EXPECT_FALSE(session_.Begin(2));
  EXPECT_TRUE(ended_.empty());
}

TEST_F(SharedSessionTest, RefusesMoreEndsThanItCanRemember) {
  for (size_t n = 0; n < SharedSession::kMaxEndedUses; ++n) {
    ASSERT_EQ(session_.EndUse(n), SharedSession::End::kEnded);
  }
  EXPECT_EQ(session_.EndUse(SharedSession::kMaxEndedUses), SharedSession::End::kTooMany);
  EXPECT_FALSE(session_.Begin(7));  // forgotten now
  EXPECT_EQ(session_.EndUse(SharedSession::kMaxEndedUses), SharedSession::End::kEnded);
}

TEST_F(SharedSessionTest, SaysNothingAndBeginsNothingOnceClosed) {
  ASSERT_TRUE(session_.Begin(1));
  session_.EndUse(1);
  session_.Close();
  session_.Finish(1);
  EXPECT_TRUE(ended_.empty());
  EXPECT_FALSE(session_.Begin(2));
}

}  // namespace
}  // namespace attnd
