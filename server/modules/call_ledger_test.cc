#include "server/modules/call_ledger.h"

#include <gtest/gtest.h>

#include "server/call/status_details.h"

namespace attnd {
namespace {

TEST(CallLedger, TakesAChangeOnceAndKnowsItAgain) {
  CallLedger ledger;
  EXPECT_EQ(*ledger.CheckChange(0, "a"), CallLedger::Change::kNew);
  ledger.Changed("a", "reply");
  EXPECT_EQ(ledger.sequence(), 1);
  EXPECT_EQ(*ledger.CheckChange(0, "a"), CallLedger::Change::kSeen);
  EXPECT_EQ(ledger.last_reply(), "reply");
  EXPECT_EQ(ReasonOf(ledger.CheckChange(0, "b").status()), reason::kStepConflict);
  EXPECT_EQ(*ledger.CheckChange(1, "b"), CallLedger::Change::kNew);
}

TEST(CallLedger, KnowsTheLastChangeAfterARestart) {
  CallLedger ledger;
  ledger.Restore(7, "a", "reply");
  EXPECT_EQ(*ledger.CheckChange(6, "a"), CallLedger::Change::kSeen);
  EXPECT_EQ(*ledger.CheckChange(7, "b"), CallLedger::Change::kNew);
  EXPECT_EQ(ledger.last_reply(), "reply");
}

TEST(CallLedger, RefusesChangesOfOtherSequences) {
  CallLedger ledger;
  EXPECT_EQ(ReasonOf(ledger.CheckChange(1, "a").status()), reason::kStepOutOfOrder);
  EXPECT_EQ(ReasonOf(ledger.CheckChange(UINT64_MAX, "a").status()), reason::kStepOutOfOrder);
  ledger.Changed("a", "");
  ledger.Changed("b", "");
  EXPECT_EQ(ReasonOf(ledger.CheckChange(0, "a").status()), reason::kStepOutOfOrder);
  EXPECT_EQ(ReasonOf(ledger.CheckSequence(1)), reason::kSequenceMismatch);
  EXPECT_TRUE(ledger.CheckSequence(2).ok());
}

TEST(CallLedger, AddsMicroBatchesInOrderAndOnce) {
  CallLedger ledger;
  EXPECT_EQ(*ledger.PlaceOf(1, "b"), CallLedger::Place::kEarly);
  EXPECT_EQ(*ledger.PlaceOf(0, "a"), CallLedger::Place::kNext);
  ledger.Added("a");
  EXPECT_EQ(*ledger.PlaceOf(0, "a"), CallLedger::Place::kAdded);
  EXPECT_EQ(ReasonOf(ledger.PlaceOf(0, "x").status()), reason::kMicroBatchConflict);
  EXPECT_EQ(*ledger.PlaceOf(1, "b"), CallLedger::Place::kNext);
}

TEST(CallLedger, NamesTheMicroBatchesThatMiss) {
  CallLedger ledger;
  ledger.Added("a");
  EXPECT_TRUE(ledger.CheckGradient(1).ok());
  const absl::Status missing = ledger.CheckGradient(3);
  EXPECT_EQ(ReasonOf(missing), reason::kGradientIncomplete);
  EXPECT_EQ(missing.message(), "micro_batches: expected 3, got 1; missing: 1,2");
  EXPECT_EQ(ledger.CheckGradient(0).message(), "micro_batches: expected 0, got 1");
  ledger.Changed("step", "");
  EXPECT_EQ(ledger.micro_batches(), 0);
}

}  // namespace
}  // namespace attnd
