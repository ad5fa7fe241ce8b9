#include "server/rpc/call_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace attnd {
namespace {

const absl::Time kStart = absl::UnixEpoch() + absl::Seconds(100);

class CountingCall final : public WatchedCall {
 public:
  using WatchedCall::WatchedCall;
  void Cut(const absl::Status&) override { ++cuts_; }
  int cuts() const { return cuts_; }

 private:
  std::atomic<int> cuts_{0};
};

TEST(CallWatch, CutsTheSilentAndNotTheBusy) {
  FakeClock clock(kStart);
  CallWatch watch({.idle = absl::Milliseconds(20), .min_bytes_per_second = 0});
  CountingCall silent(clock), other(clock), busy(clock), waits_for_nobody(clock);
  for (CountingCall* call : {&silent, &other, &busy, &waits_for_nobody}) {
    call->progress()->CallBegan(kStart);
  }
  for (CountingCall* call : {&silent, &other, &busy}) call->progress()->Begin();
  clock.Advance(absl::Seconds(1));
  busy.progress()->Moved(1);
  for (CountingCall* call : {&silent, &other, &busy, &waits_for_nobody}) watch.Add(*call);
  while (silent.cuts() == 0) std::this_thread::yield();
  watch.Remove(silent);
  const int cuts = silent.cuts(), others = other.cuts();
  while (other.cuts() < others + 2) std::this_thread::yield();
  EXPECT_EQ(silent.cuts(), cuts);  // nothing after Remove
  for (CountingCall* call : {&other, &busy, &waits_for_nobody}) watch.Remove(*call);
  EXPECT_EQ(busy.cuts(), 0);
  EXPECT_EQ(waits_for_nobody.cuts(), 0);
}

}  // namespace
}  // namespace attnd
