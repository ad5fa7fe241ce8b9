#include "server/rpc/fair_shares.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

// How many that `holder` gets, one by one.
int64_t TakeAll(FairShares& shares, const FairShares::Holder& holder,
                std::vector<FairShares::Share>& held, FairShares::Outcome* last = nullptr) {
  for (int64_t taken = 0;; ++taken) {
    FairShares::Share share;
    const FairShares::Outcome outcome = shares.Take(holder, 1, share);
    if (last != nullptr) *last = outcome;
    if (outcome != FairShares::Outcome::kTaken) return taken;
    held.push_back(std::move(share));
  }
}

TEST(FairShares, LeaveRoomForEveryFurtherCaller) {
  FairShares shares(64);
  std::vector<FairShares::Share> held;
  FairShares::Outcome last;
  EXPECT_EQ(TakeAll(shares, {"a", "1"}, held, &last), 32);
  EXPECT_EQ(last, FairShares::Outcome::kOwnIsFull);
  EXPECT_EQ(TakeAll(shares, {"b", "2"}, held, &last), 16);
  EXPECT_EQ(last, FairShares::Outcome::kFull);
  EXPECT_EQ(TakeAll(shares, {"c", "3"}, held), 8);
  EXPECT_EQ(TakeAll(shares, {"d", "4"}, held), 4);
  EXPECT_EQ(shares.held(), 60);
  held.clear();
  EXPECT_EQ(shares.held(), 0);
  EXPECT_EQ(TakeAll(shares, {"b", "2"}, held), 32);
}

TEST(FairShares, LeaveRoomForOtherAddressesOfManyCallers) {
  FairShares shares(64);
  std::vector<FairShares::Share> held;
  int64_t taken = 0;
  for (int caller = 0; caller < 20; ++caller) {
    taken += TakeAll(shares, {absl::StrCat("c", caller), "proxy"}, held);
  }
  EXPECT_EQ(taken, 60);
  EXPECT_EQ(TakeAll(shares, {"other", "elsewhere"}, held), 2);
}

TEST(FairShares, GrowAndComeBackWithTheShare) {
  FairShares shares(100);
  FairShares::Share share, moved;
  EXPECT_EQ(shares.Take({"a", "1"}, 10, share), FairShares::Outcome::kTaken);
  EXPECT_EQ(shares.Grow(share, 40), FairShares::Outcome::kTaken);
  EXPECT_EQ(shares.Grow(share, 1), FairShares::Outcome::kOwnIsFull);
  EXPECT_EQ(share.amount(), 50);
  moved = std::move(share);
  EXPECT_EQ(shares.held(), 50);
  moved = FairShares::Share();
  EXPECT_EQ(shares.held(), 0);
}

}  // namespace
}  // namespace attnd
