#include "base/receive_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace attnd {
namespace {

constexpr int64_t kMib = 1 << 20, kLimit = 64 * kMib;

class ReceiveMemoryTest : public testing::Test {
 protected:
  // One that has brought `has` bytes of messages of `has + lacks`.
  class Peer final : public ReceiveMemory::Connection {
   public:
    Peer(ReceiveMemory& memory, int64_t has, int64_t lacks, uint64_t address)
        : wants{.lacking = lacks, .begun = has + lacks, .address = address}, memory_(memory) {}
    bool AskAgain(absl::Time now) override {
      if (is_reset || has_ended) {
        memory_.Leave(place_);
        return false;
      }
      may_read = memory_.MayRead(place_, wants, self, now);
      return true;
    }
    Ended Reset() override {
      memory_.Leave(place_);
      is_reset = true;
      return {1, wants.begun - wants.lacking};
    }
    // Its messages have ended.
    void Finish() { wants = {.finished = wants.finished + wants.begun, .address = wants.address}; }

    ReceiveMemory::Wants wants;
    std::weak_ptr<Connection> self;
    bool may_read = false, is_reset = false, has_ended = false;

   private:
    ReceiveMemory& memory_;
    int64_t place_ = 0;
  };

  // Of an address of its own.
  std::shared_ptr<Peer> Begin(int64_t has, int64_t lacks) {
    return Begin(has, lacks, --last_address_);
  }
  std::shared_ptr<Peer> Begin(int64_t has, int64_t lacks, uint64_t address) {
    auto peer = std::make_shared<Peer>(memory_, has, lacks, address);
    peer->self = peer;
    memory_.Join(peer);
    peer->AskAgain(now_);
    return peer;
  }

  uint64_t last_address_ = 0;
  std::atomic<int64_t> used_{0};
  std::vector<int64_t> told_;
  ReceiveMemory memory_{kLimit, used_,
                        [this](int, int64_t, int64_t total) { told_.push_back(total); }};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(ReceiveMemoryTest, ReadsEverybodyWhileHalfIsFree) {
  used_ = kLimit / 2 - 1;
  EXPECT_FALSE(memory_.IsShort());
  EXPECT_TRUE(Begin(0, 100 * kLimit)->may_read);
  EXPECT_EQ(memory_.waiting(), 0);
}

TEST_F(ReceiveMemoryTest, ReadsOneMessageBesideACrowd) {
  used_ = kLimit / 2;
  EXPECT_TRUE(memory_.IsShort());
  for (int n = 0; n < 100; ++n) EXPECT_FALSE(Begin(kMib / 2, kLimit)->may_read);
  EXPECT_TRUE(Begin(0, 16 * kMib)->may_read);
}

TEST_F(ReceiveMemoryTest, PromisesSevenEighthsInAll) {
  used_ = kLimit / 2;
  auto first = Begin(0, 16 * kMib, 1), second = Begin(0, 9 * kMib, 2),
       third = Begin(0, 8 * kMib, 2);
  EXPECT_TRUE(first->may_read);
  EXPECT_FALSE(second->may_read);
  EXPECT_FALSE(third->may_read);  // there would be room, but it came later
  EXPECT_TRUE(Begin(0, 8 * kMib, 3)->may_read);
  auto fourth = Begin(0, kMib, 3);
  EXPECT_FALSE(fourth->may_read);
  EXPECT_EQ(memory_.waiting(), 3);
  first->Finish();
  memory_.Look(now_);
  memory_.Look(now_);
  EXPECT_TRUE(second->may_read);
  EXPECT_FALSE(third->may_read);
}

TEST_F(ReceiveMemoryTest, PromisesTheMessagesOfAnAddressHalfOfThat) {
  used_ = kLimit / 2;
  auto stalled = Begin(0, 12 * kMib, 1);
  EXPECT_TRUE(stalled->may_read);
  stalled->wants.lacking = 1;
  used_ += 12 * kMib;
  memory_.Look(now_);
  EXPECT_FALSE(Begin(0, kMib, 1)->may_read);
  EXPECT_TRUE(Begin(0, 12 * kMib - 1, 2)->may_read);
}

TEST_F(ReceiveMemoryTest, TakesBackWhatWasPromisedToWhoIsGone) {
  used_ = kLimit / 2;
  auto ended = Begin(0, 10 * kMib), gone = Begin(0, 10 * kMib), next = Begin(0, 20 * kMib);
  EXPECT_FALSE(next->may_read);
  ended->has_ended = true;
  gone.reset();
  memory_.Look(now_);
  memory_.Look(now_);
  EXPECT_TRUE(next->may_read);
}

TEST_F(ReceiveMemoryTest, ReadsWhoLacksLittleUntilTheLimit) {
  used_ = kLimit - 1;
  EXPECT_TRUE(Begin(0, ReceiveMemory::kLittle)->may_read);
  EXPECT_FALSE(Begin(0, ReceiveMemory::kLittle + 1)->may_read);
  used_ = kLimit;
  auto little = Begin(0, 1);
  EXPECT_FALSE(little->may_read);
  used_ = kLimit / 2 - 1;
  memory_.Look(now_);
  EXPECT_TRUE(little->may_read);
}

TEST_F(ReceiveMemoryTest, ResetsTheOldestUntilThreeQuartersAreFree) {
  used_ = kLimit / 2;
  std::vector<std::shared_ptr<Peer>> crowd;
  for (int n = 0; n < 8; ++n) crowd.push_back(Begin(kLimit / 16, kLimit));
  now_ += ReceiveMemory::kPatience - absl::Milliseconds(1);
  auto late = Begin(0, kLimit);
  memory_.Look(now_);
  EXPECT_EQ(memory_.resets(), 0);
  now_ += absl::Milliseconds(1);
  memory_.Look(now_);
  for (int n = 0; n < 8; ++n) EXPECT_EQ(crowd[n]->is_reset, n < 5) << n;
  EXPECT_FALSE(late->is_reset);
  EXPECT_EQ(memory_.resets(), 5);
  EXPECT_EQ(told_, std::vector<int64_t>{1});
}

TEST_F(ReceiveMemoryTest, ResetsWhoSaysNothingAfterItsMessagesHaveBegun) {
  auto silent = Begin(kLimit / 2, kLimit);  // before memory was short
  used_ = kLimit / 2;
  memory_.Look(now_);
  now_ += ReceiveMemory::kPatience;
  memory_.Look(now_);
  EXPECT_TRUE(silent->is_reset);
}

TEST_F(ReceiveMemoryTest, ResetsWhoDoesNotSendWhatItWasPromised) {
  used_ = kLimit / 2;
  auto slow = Begin(0, 10 * kMib), quick = Begin(0, 10 * kMib);
  now_ += ReceiveMemory::kPatience - absl::Milliseconds(1);
  quick->Finish();
  quick->wants.lacking = 10 * kMib;  // and begins another
  memory_.Look(now_);
  now_ += absl::Milliseconds(1);
  memory_.Look(now_);
  EXPECT_TRUE(slow->is_reset);
  EXPECT_FALSE(quick->is_reset);
}

TEST_F(ReceiveMemoryTest, GivesWhoHasWaitedTimeToSend) {
  used_ = kLimit / 2;
  auto first = Begin(0, 20 * kMib), second = Begin(0, 20 * kMib);
  now_ += ReceiveMemory::kPatience - absl::Milliseconds(1);
  first->Finish();
  memory_.Look(now_);
  memory_.Look(now_);
  EXPECT_TRUE(second->may_read);
  now_ += absl::Milliseconds(1);
  memory_.Look(now_);
  EXPECT_FALSE(second->is_reset);
}

TEST_F(ReceiveMemoryTest, HoldsNobodyOnceItHasStopped) {
  memory_.Start();
  used_ = kLimit;
  auto waiting = Begin(0, kLimit);
  EXPECT_FALSE(waiting->may_read);
  memory_.Stop();
  EXPECT_TRUE(waiting->may_read);
  EXPECT_TRUE(Begin(0, kLimit)->may_read);
}

}  // namespace
}  // namespace attnd
