#include "client/call/call_state.h"

#include <gtest/gtest.h>

#include <thread>

namespace attnd {
namespace {

TEST(CallState, HandsOutDelayedShardsWhenTheyAreDue) {
  FakeClock clock;
  CallState state({0, 1}, {.shards_total = 2}, nullptr, clock);
  EXPECT_EQ(state.TakeReady(), 0);
  EXPECT_EQ(state.TakeReady(), 1);
  EXPECT_FALSE(state.TakeReady().has_value());
  EXPECT_EQ(state.NextDue(), absl::InfiniteFuture());
  EXPECT_FALSE(state.WaitUntilDue(absl::InfiniteFuture()));  // nothing to wait for
  state.Delay(1, absl::Seconds(2));
  state.Delay(0, absl::Seconds(1));
  EXPECT_EQ(state.NextDue(), clock.Now() + absl::Seconds(1));
  EXPECT_TRUE(state.WaitUntilDue(clock.Now()));  // still something to wait for
  EXPECT_FALSE(state.TakeReady().has_value());
  clock.Advance(absl::Seconds(1));
  EXPECT_TRUE(state.WaitUntilDue(absl::InfiniteFuture()));
  EXPECT_EQ(state.TakeReady(), 0);
  EXPECT_FALSE(state.TakeReady().has_value());
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(state.TakeReady(), 1);
}

TEST(CallState, HandsOutFewerAtATimeOnceItHasBeenNarrowed) {
  FakeClock clock;
  CallState state({0, 1, 2, 3}, {.shards_total = 4}, nullptr, clock);
  for (int64_t shard : {0, 1, 2}) EXPECT_EQ(state.TakeReady(), shard);
  EXPECT_TRUE(state.Narrow(1));  // two are left
  EXPECT_FALSE(state.TakeReady().has_value());
  EXPECT_TRUE(state.Narrow(0));
  EXPECT_FALSE(state.Narrow(2));  // the only one: somebody else has the room
  EXPECT_TRUE(state.WaitUntilDue(clock.Now()));
  std::thread waiter([&] {
    EXPECT_TRUE(state.WaitUntilDue(absl::InfiniteFuture()));
    EXPECT_EQ(state.TakeReady(), 3);
    EXPECT_FALSE(state.TakeReady().has_value());
  });
  state.Done({}, 0);
  waiter.join();
  state.Delay(3, absl::ZeroDuration());
  for (int64_t shard : {1, 0, 3}) {
    EXPECT_EQ(state.TakeReady(), shard);
    EXPECT_FALSE(state.TakeReady().has_value());
    state.Done({}, 0);
  }
  EXPECT_FALSE(state.WaitUntilDue(absl::InfiniteFuture()));
  EXPECT_TRUE(state.Result().ok());
}

TEST(CallState, KeepsTheFirstFailureAndDropsWhatWaits) {
  FakeClock clock;
  CallState state({0, 1, 2}, {.shards_total = 3}, nullptr, clock);
  EXPECT_EQ(state.TakeReady(), 0);
  state.Delay(0, absl::Hours(1));
  std::thread waiter([&] {
    while (state.TakeReady().has_value()) {
    }
    EXPECT_FALSE(state.WaitUntilDue(absl::InfiniteFuture()));
  });
  state.Fail(absl::UnavailableError("first"));
  state.Fail(absl::InternalError("second"));
  waiter.join();
  EXPECT_TRUE(state.failed());
  EXPECT_EQ(state.Result().status(), absl::UnavailableError("first"));
  grpc::ClientContext context;
  EXPECT_FALSE(state.Register(&context));
  state.Delay(1, absl::ZeroDuration());
  EXPECT_FALSE(state.TakeReady().has_value());
}

TEST(CallState, MergesReceiptsAndReportsProgress) {
  FakeClock clock;
  std::vector<int64_t> done;
  CallState state(
      {0, 1}, {.shards_total = 2}, [&](const Progress& now) { done.push_back(now.shards_done); },
      clock);
  ShardReceipt receipt;
  receipt.kernel = "k";
  receipt.deterministic = true;
  receipt.stages.push_back({"queue", absl::Nanoseconds(10)});
  state.Done(receipt, 100);
  receipt.stages[0].duration = absl::Nanoseconds(30);
  receipt.stages.push_back({"kernel", absl::ZeroDuration()});
  receipt.deterministic = false;
  receipt.float16 = true;
  state.CountSent(7, 3);
  state.Done(receipt, 11);
  absl::StatusOr<CallReceipt> merged = state.Result();
  ASSERT_TRUE(merged.ok());
  EXPECT_EQ(done, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(merged->bytes_received, 111);
  EXPECT_EQ(merged->bytes_sent, 7);
  EXPECT_EQ(merged->bytes_copied, 3);
  EXPECT_FALSE(merged->deterministic);
  EXPECT_EQ(merged->accumulate, AccumulateType::kFloat16);
  ASSERT_EQ(merged->stages.size(), 2u);
  EXPECT_EQ(merged->stages[0].name, "queue");
  EXPECT_EQ(merged->stages[0].total, absl::Nanoseconds(40));
  EXPECT_EQ(merged->stages[0].longest, absl::Nanoseconds(30));
}

}  // namespace
}  // namespace attnd
