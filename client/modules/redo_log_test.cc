#include "client/modules/redo_log.h"

#include <gtest/gtest.h>

#include <string>

namespace attnd {
namespace {

SentBackward BackwardOf(uint32_t number, size_t bytes) {
  auto forward = std::make_shared<SentForward>();
  forward->x = KeptBytes::Zeros(bytes / 2);
  return {forward, KeptBytes::Zeros(bytes - bytes / 2), number, nullptr};
}

void AddStep(RedoLog& log, uint32_t micro_batches, size_t bytes) {
  for (uint32_t n = 0; n < micro_batches; ++n) log.Add(BackwardOf(n, bytes));
  log.End(v1::StepRequest());
}

TEST(RedoLog, GivesCallsInOrderFromASequenceOn) {
  RedoLog log(1000);
  log.Begin(7);
  AddStep(log, 2, 100);
  AddStep(log, 1, 100);
  log.Add(BackwardOf(0, 100));
  ASSERT_TRUE(log.CanReplayFrom(7));
  const std::vector<RedoLog::Entry> entries = log.From(8);
  ASSERT_EQ(entries.size(), 2);
  EXPECT_EQ(entries[0].sequence, 8);
  EXPECT_EQ(entries[0].end.size(), 1);
  EXPECT_EQ(entries[1].sequence, 9);
  EXPECT_EQ(entries[1].backwards.size(), 1);
  EXPECT_TRUE(entries[1].end.empty());
  EXPECT_EQ(log.bytes(), 400);
}

TEST(RedoLog, ForgetsGradientsThatWillBeCleared) {
  RedoLog log(1000);
  log.Begin(7);
  AddStep(log, 2, 100);
  log.Add(BackwardOf(0, 100));
  log.Add(BackwardOf(1, 200));
  log.ForgetGradients();
  EXPECT_EQ(log.bytes(), 200);
  ASSERT_TRUE(log.CanReplayFrom(8));
  log.End(v1::StepRequest());
  ASSERT_EQ(log.From(7).size(), 2);
  EXPECT_EQ(log.From(7)[0].backwards.size(), 2);
  EXPECT_TRUE(log.From(7)[1].backwards.empty());
}

TEST(RedoLog, CountsGradientsThatWerePut) {
  RedoLog log(1000);
  log.Begin(7);
  auto put = std::make_shared<SentPut>();
  put->tensors.push_back({{}, std::make_shared<const std::string>(300, 'x')});
  log.Add({.forward = nullptr, .dy = {}, .micro_batch = 0, .gradients = put});
  EXPECT_EQ(log.bytes(), 300);
  log.ForgetGradients();
  EXPECT_EQ(log.bytes(), 0);
}

TEST(RedoLog, SaysNoForSequencesThatItHasNotSeen) {
  RedoLog log(1000);
  log.Begin(7);
  EXPECT_FALSE(log.CanReplayFrom(6));
  EXPECT_TRUE(log.CanReplayFrom(7));
  EXPECT_FALSE(log.CanReplayFrom(8));
}

TEST(RedoLog, ForgetsWhatIsDurable) {
  RedoLog log(1000);
  log.Begin(0);
  for (int n = 0; n < 4; ++n) AddStep(log, 1, 100);
  log.ForgetBefore(3);
  EXPECT_EQ(log.bytes(), 100);
  EXPECT_FALSE(log.CanReplayFrom(2));
  EXPECT_TRUE(log.CanReplayFrom(3));
}

TEST(RedoLog, ForgetsTheOldestSequenceBeyondItsBytes) {
  RedoLog log(300);
  log.Begin(0);
  for (int n = 0; n < 4; ++n) AddStep(log, 1, 100);
  EXPECT_EQ(log.bytes(), 300);
  EXPECT_FALSE(log.CanReplayFrom(0));
  EXPECT_TRUE(log.CanReplayFrom(1));
}

TEST(RedoLog, CannotReplayASequenceOfWhichAPartDidNotFit) {
  RedoLog log(250);
  log.Begin(0);
  AddStep(log, 5, 100);
  EXPECT_FALSE(log.CanReplayFrom(0));
  EXPECT_TRUE(log.CanReplayFrom(1));
  EXPECT_TRUE(log.From(1).empty());
  AddStep(log, 1, 100);
  EXPECT_EQ(log.From(1).size(), 1);
}

TEST(RedoLog, GoesOnBehindASequenceWhoseCallsAreNotKept) {
  RedoLog log(1000);
  log.Begin(0);
  AddStep(log, 1, 100);
  log.LosePresent();
  EXPECT_EQ(log.bytes(), 0);
  EXPECT_FALSE(log.CanReplayFrom(1));
  AddStep(log, 1, 100);
  EXPECT_EQ(log.bytes(), 0);
  EXPECT_FALSE(log.CanReplayFrom(1));
  EXPECT_TRUE(log.CanReplayFrom(2));
}

TEST(RedoLog, CountsTheTensorsOfAPut) {
  RedoLog log(1000);
  log.Begin(0);
  auto put = std::make_shared<SentPut>();
  put->tensors.push_back({{}, std::make_shared<const std::string>(400, 'w')});
  log.End(std::shared_ptr<const SentPut>(put));
  EXPECT_EQ(log.bytes(), 400);
  EXPECT_TRUE(log.CanReplayFrom(0));
}

}  // namespace
}  // namespace attnd
