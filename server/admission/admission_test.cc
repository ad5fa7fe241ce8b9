#include "server/admission/admission.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "server/call/status_details.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

class AdmissionTest : public testing::Test {
 protected:
  AdmissionTest() : cost_(1e9) {}

  void Make(const AdmissionLimits& limits) {
    admission_ = std::make_unique<Admission>(limits, backend_, cost_, clock_);
  }
  absl::StatusOr<AdmittedCall> Admit(const std::string& caller = "a",
                                     absl::Time deadline = absl::InfiniteFuture(),
                                     int64_t length = 16) {
    return admission_->Admit(DecodedCall(SmallProblem(length)),
                             {.id = ++ids_, .caller = caller, .deadline = deadline});
  }
  // One call of SmallProblem takes q, k, v, o of 1 KiB each and lse of 128 bytes.
  static constexpr int64_t kCallBytes = 4 * 1024 + 128;

  GatedBackend backend_;
  CostModel cost_;
  FakeClock clock_{absl::UnixEpoch() + absl::Hours(1)};
  std::unique_ptr<Admission> admission_;
  uint64_t ids_ = 0;
};

TEST_F(AdmissionTest, CountsExactlyWhatTheCallTakes) {
  Make({});
  backend_.SetWorkspace(100);
  auto call = Admit();
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->bytes(), kCallBytes + 128);  // workspace rounded up to 64 bytes
  EXPECT_EQ(admission_->Use().bytes, kCallBytes + 128);
  EXPECT_EQ(admission_->Use().calls, 1);
  EXPECT_GT(admission_->Use().seconds, 0);
}

TEST_F(AdmissionTest, ReturnsBudgetWhenTheCallDies) {
  Make({});
  { auto call = Admit(); }
  EXPECT_EQ(admission_->Use().bytes, 0);
  EXPECT_EQ(admission_->Use().calls, 0);
  EXPECT_EQ(admission_->Use().seconds, 0);
}

TEST_F(AdmissionTest, ReturnsWorkAndMemoryApart) {
  Make({});
  auto call = Admit();
  call->ticket().ReleaseWork();
  EXPECT_EQ(admission_->Use().calls, 0);
  EXPECT_EQ(admission_->Use().bytes, kCallBytes);
  call->ticket().ShrinkTo(1024);
  EXPECT_EQ(admission_->Use().bytes, 1024);
  Ticket moved = std::move(call->ticket());
  EXPECT_EQ(admission_->Use().bytes, 1024);
  moved = Ticket();
  EXPECT_EQ(admission_->Use().bytes, 0);
}

TEST_F(AdmissionTest, TicketOutlivesAdmission) {
  Make({});
  Ticket ticket = std::move(Admit()->ticket());
  admission_.reset();
  ticket.ShrinkTo(0);
}

TEST_F(AdmissionTest, TakesTheLastCallAndRefusesOneAbove) {
  Make({.max_calls = 2});
  auto first = Admit(), second = Admit();
  ASSERT_TRUE(second.ok());
  auto third = Admit();
  EXPECT_EQ(third.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(third.status()), reason::kQueueFull);
  EXPECT_TRUE(RetryAfterOf(third.status()).has_value());
  first = absl::CancelledError();
  EXPECT_TRUE(Admit().ok());
}

TEST_F(AdmissionTest, TakesTheLastByteAndRefusesOneAbove) {
  Make({.memory_bytes = 2 * kCallBytes});
  auto first = Admit(), second = Admit();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(admission_->Use().bytes, 2 * kCallBytes);
  auto third = Admit();
  EXPECT_EQ(third.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(third.status()), reason::kMemoryPressure);
  EXPECT_TRUE(absl::StrContains(third.status().message(), "at most 8448")) << third.status();
}

TEST_F(AdmissionTest, TakesACallAsLargeAsTheLimitAndRefusesOneAbove) {
  Make({.memory_bytes = kCallBytes});
  EXPECT_TRUE(Admit().ok());
  Make({.memory_bytes = kCallBytes - 64});
  auto call = Admit();
  EXPECT_EQ(call.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ReasonOf(call.status()), reason::kTooLargeForDevice);
  // Also when it would be late too: no later deadline cures it.
  EXPECT_EQ(ReasonOf(Admit("a", clock_.Now()).status()), reason::kTooLargeForDevice);
}

TEST_F(AdmissionTest, RefusesAReplyAboveTheMessageLimit) {
  Make({.max_reply_bytes = 1024 + 128});
  EXPECT_TRUE(Admit().ok());
  Make({.max_reply_bytes = 1024 + 127});
  auto call = Admit();
  EXPECT_EQ(call.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ReasonOf(call.status()), reason::kReplyTooLarge);
}

TEST_F(AdmissionTest, TakesALongCallWhenIdleAndRefusesTheNextBehindIt) {
  Make({.max_queue_seconds = 1e-6});
  auto first = Admit();  // more than a microsecond of work, but nothing ahead of it
  ASSERT_TRUE(first.ok());
  auto second = Admit();
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(second.status()), reason::kQueueFull);
}

TEST_F(AdmissionTest, KeepsOneCallersQuotaApartFromOthers) {
  Make({.caller_max_calls = 1});
  auto first = Admit("a");
  auto second = Admit("a");
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(second.status()), reason::kTenantQuota);
  EXPECT_TRUE(Admit("b").ok());
  first = absl::CancelledError();
  EXPECT_TRUE(Admit("a").ok());
}

TEST_F(AdmissionTest, CountsACallersBytesUntilItsRepliesAreSent) {
  Make({.caller_max_bytes = kCallBytes});
  auto first = Admit("a");
  first->ticket().ReleaseWork();
  first->ticket().ShrinkTo(64);
  auto second = Admit("a");
  EXPECT_EQ(ReasonOf(second.status()), reason::kTenantQuota);
  first->ticket().ShrinkTo(0);
  EXPECT_TRUE(Admit("a").ok());
}

TEST_F(AdmissionTest, CountsMemoryOfOtherCallsBesideThatOfItsOwn) {
  Make({.memory_bytes = 3 * kCallBytes, .caller_max_bytes = 2 * kCallBytes});
  auto held = admission_->HoldStaging("a", kCallBytes);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(admission_->Use().bytes, kCallBytes);
  EXPECT_EQ(admission_->Use().calls, 0);
  EXPECT_FALSE(admission_->HoldsOverHalf("a"));
  auto call = Admit("a");
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(ReasonOf(admission_->HoldStaging("a", 1).status()), reason::kTenantQuota);
  EXPECT_EQ(ReasonOf(Admit("a").status()), reason::kTenantQuota);
  auto other = admission_->HoldStaging("b", kCallBytes);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(ReasonOf(Admit("c").status()), reason::kMemoryPressure);
  EXPECT_EQ(ReasonOf(admission_->HoldStaging("c", 1).status()), reason::kMemoryPressure);
  EXPECT_EQ(admission_->HoldStaging("a", 2 * kCallBytes + 1).status().code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(admission_->HoldsOverHalf("a"));
  EXPECT_TRUE(admission_->HoldsOverHalf("c"));  // of all there is
  Ticket part = other->SplitOff(64);
  *other = Ticket();
  EXPECT_EQ(admission_->Use().bytes, 2 * kCallBytes + 64);
  part = Ticket();
  *held = Ticket();
  EXPECT_TRUE(Admit("a").ok());
}

TEST_F(AdmissionTest, RefusesForGoodWhatACallersQuotaNeverHolds) {
  Make({.caller_max_bytes = kCallBytes - 1});
  auto call = Admit("a");
  EXPECT_EQ(call.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ReasonOf(call.status()), reason::kTooLargeForDevice);
  EXPECT_FALSE(RetryAfterOf(call.status()).has_value());
}

TEST_F(AdmissionTest, RefusesADeadlineThatCannotBeMet) {
  Make({});
  auto late = Admit("a", clock_.Now() + absl::Microseconds(1));
  EXPECT_EQ(late.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(late.status()), reason::kDeadlineUnmeetable);
  EXPECT_TRUE(Admit("a", clock_.Now() + absl::Seconds(1)).ok());
}

TEST_F(AdmissionTest, CountsTheQueueAheadAgainstADeadline) {
  Make({});
  // About 4.2e9 flops at 1e9 a second: four seconds of work.
  Problem large = SmallProblem(4096, 8);
  auto ahead = admission_->Admit(DecodedCall(large), {.id = 1, .caller = "a"});
  ASSERT_TRUE(ahead.ok()) << ahead.status();
  ASSERT_GT(admission_->Use().seconds, 3);
  ahead->ticket().StartWork();  // from now on nothing passes it
  EXPECT_EQ(ReasonOf(Admit("a", clock_.Now() + absl::Seconds(1)).status()),
            reason::kDeadlineUnmeetable);
  const absl::Duration queue = absl::Seconds(admission_->Use().seconds);
  EXPECT_EQ(ReasonOf(Admit("a", clock_.Now() + 0.9 * queue).status()),
            reason::kDeadlineUnmeetable);  // in full: a call let in too late is work for nobody
  EXPECT_EQ(ReasonOf(Admit("a", clock_.Now() + 1.05 * queue).status()),
            reason::kDeadlineUnmeetable);  // and the answer has its way to go
  EXPECT_TRUE(Admit("a", clock_.Now() + 1.15 * queue).ok());
  EXPECT_TRUE(Admit("a", clock_.Now() + absl::Seconds(10)).ok());
}

TEST_F(AdmissionTest, CountsTheQueueAtItsPace) {
  Make({.max_queue_seconds = 6});
  auto ahead = admission_->Admit(DecodedCall(SmallProblem(4096, 8)), {.id = 1, .caller = "a"});
  ASSERT_TRUE(ahead.ok()) << ahead.status();
  ahead->ticket().StartWork();
  const double queue = admission_->QueueSeconds(0);
  ASSERT_NEAR(queue, 4.3, 0.3);
  const absl::Time deadline = clock_.Now() + absl::Seconds(3);
  EXPECT_EQ(ReasonOf(Admit("a", deadline).status()), reason::kDeadlineUnmeetable);
  for (int n = 0; n < 100; ++n) cost_.Served(1, 0.5);
  EXPECT_NEAR(admission_->QueueSeconds(0), queue / 2, 0.1);
  EXPECT_TRUE(Admit("a", deadline).ok());
  for (int n = 0; n < 100; ++n) cost_.Served(1, 2);
  EXPECT_EQ(ReasonOf(Admit("a", clock_.Now() + absl::Seconds(8)).status()),
            reason::kDeadlineUnmeetable);
  EXPECT_EQ(ReasonOf(Admit("a").status()), reason::kQueueFull);
}

// As the batcher will: a caller whose long queue is his own stands in nobody's way.
TEST_F(AdmissionTest, CountsOnlyItsShareOfAnotherCallersQueueAgainstADeadline) {
  Make({});
  auto ahead = admission_->Admit(DecodedCall(SmallProblem(4096, 8)), {.id = 1, .caller = "a"});
  ASSERT_TRUE(ahead.ok()) << ahead.status();
  ahead->ticket().StartWork();
  const double queue = admission_->QueueSeconds(0);
  const absl::Time soon = clock_.Now() + absl::Seconds(1);
  EXPECT_EQ(ReasonOf(Admit("a", soon).status()), reason::kDeadlineUnmeetable);
  EXPECT_TRUE(Admit("b", soon).ok());
  // Half of what a and b have each, from here on.
  Problem half = SmallProblem(4096, 4);
  auto of_b = admission_->Admit(DecodedCall(half), {.id = 2, .caller = "b"});
  ASSERT_TRUE(of_b.ok()) << of_b.status();
  of_b->ticket().StartWork();
  EXPECT_EQ(ReasonOf(Admit("b", clock_.Now() + absl::Seconds(0.9 * queue)).status()),
            reason::kDeadlineUnmeetable);
  EXPECT_TRUE(Admit("b", clock_.Now() + absl::Seconds(1.2 * queue)).ok());
}

TEST_F(AdmissionTest, CountsLittleOfLowPriorityWorkAheadOfAHighOne) {
  Make({});
  auto low = admission_->Admit(DecodedCall(SmallProblem(4096, 8), Priority::kLow),
                               {.id = 1, .caller = "a"});
  ASSERT_TRUE(low.ok()) << low.status();
  low->ticket().StartWork();
  auto admit = [&](Priority priority, int64_t heads, double seconds) {
    return admission_->Admit(
        DecodedCall(SmallProblem(2048, heads), priority),
        {.id = 2, .caller = "a", .deadline = clock_.Now() + absl::Seconds(seconds)});
  };
  const double one = 0.27;  // seconds of one head
  EXPECT_EQ(ReasonOf(admit(Priority::kLow, 2, 4 * one).status()), reason::kDeadlineUnmeetable);
  EXPECT_TRUE(admit(Priority::kHigh, 2, 2 * one).ok());
}

TEST_F(AdmissionTest, LetsACallPassThoseOfItsCallerThatAreDueLater) {
  Make({});
  const auto in = [&](double seconds) { return clock_.Now() + absl::Seconds(seconds); };
  auto waiting = Admit("a", in(60), 4096);
  ASSERT_TRUE(waiting.ok()) << waiting.status();
  ASSERT_GT(waiting->seconds(), 0.4);
  EXPECT_TRUE(Admit("a", in(0.1)).ok());
  waiting->ticket().StartWork();
  EXPECT_EQ(ReasonOf(Admit("a", in(0.1)).status()), reason::kDeadlineUnmeetable);
  waiting->ticket().ReleaseWork();
  EXPECT_TRUE(Admit("a", in(0.1)).ok());
}

TEST_F(AdmissionTest, RefusesACallThatWouldBreakTheDeadlineOfAnAdmittedOne) {
  Make({});
  const double one = Admit("a", absl::InfiniteFuture(), 4096)->seconds();
  auto admitted = Admit("a", clock_.Now() + absl::Seconds(1.5 * one), 4096);
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  const absl::Time earlier = clock_.Now() + absl::Seconds(1.4 * one);
  const absl::Status refused = Admit("a", earlier, 4096).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(refused), reason::kQueueFull);
  EXPECT_TRUE(RetryAfterOf(refused).has_value());
  EXPECT_TRUE(Admit("a", earlier).ok());        // short enough
  EXPECT_TRUE(Admit("b", earlier, 2048).ok());  // another caller's share
}

TEST_F(AdmissionTest, CapsACallWithoutDeadline) {
  Make({.max_deadline = absl::Seconds(3)});
  auto call = Admit("a", absl::InfiniteFuture());
  EXPECT_EQ(call->context().deadline, clock_.Now() + absl::Seconds(3));
}

TEST_F(AdmissionTest, AsksTheEngineFirst) {
  Make({});
  backend_.RefuseWith(absl::UnimplementedError("problem.element: float16 is not built in"));
  auto call = Admit();
  EXPECT_EQ(call.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ReasonOf(call.status()), reason::kProblemUnsupported);
}

TEST_F(AdmissionTest, RefusesEverythingOnceDraining) {
  Make({});
  auto before = Admit();
  const absl::Time start = absl::Now();
  admission_->StartDraining();
  EXPECT_EQ(admission_->last_refused_at(), absl::InfinitePast());
  auto after = Admit();
  EXPECT_GE(admission_->last_refused_at(), start);
  EXPECT_EQ(after.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(after.status()), reason::kDraining);
  EXPECT_TRUE(RetryAfterOf(after.status()).has_value());
  EXPECT_EQ(admission_->Use().calls, 1);
}

// Two devices, the second ten times as slow.
class AdmissionDevicesTest : public testing::Test {
 protected:
  AdmissionDevicesTest() : admission_({}, {{&fast_, &fast_cost_}, {&slow_, &slow_cost_}}, clock_) {}
  absl::StatusOr<AdmittedCall> Admit() {
    return admission_.Admit(DecodedCall(SmallProblem(64)), {.caller = "a"});
  }
  FakeClock clock_{absl::UnixEpoch() + absl::Hours(1)};
  GatedBackend fast_, slow_;
  CostModel fast_cost_{1e8}, slow_cost_{1e7};
  Admission admission_;
};

TEST_F(AdmissionDevicesTest, SendsACallToTheDeviceThatWillHaveFinishedItFirst) {
  std::vector<AdmittedCall> kept;
  int slow = 0;
  for (int n = 0; n < 22; ++n) {
    kept.push_back(*Admit());
    slow += kept.back().device();
  }
  EXPECT_EQ(kept[0].device(), 0);
  EXPECT_GE(slow, 1);
  EXPECT_LE(slow, 4);  // about a tenth
  EXPECT_EQ(admission_.DeviceUse(0).calls + admission_.DeviceUse(1).calls, 22);
  kept.clear();
  EXPECT_EQ(admission_.DeviceUse(0).seconds, 0);
  EXPECT_EQ(admission_.DeviceUse(1).seconds, 0);
}

// A clock at whose first question another call comes.
class BusyClock final : public Clock {
 public:
  absl::Time Now() const override {
    if (auto call = std::exchange(call_, nullptr); call != nullptr) call();
    return absl::UnixEpoch() + absl::Hours(1);
  }
  void CallOnce(std::function<void()> call) { call_ = std::move(call); }

 private:
  mutable std::function<void()> call_;
};

TEST(AdmissionOfTwoCalls, SpreadsCallsOfWhichOneComesWhileTheOtherIsAdmitted) {
  GatedBackend first, second;
  CostModel cost{1e9};
  BusyClock clock;
  Admission admission({}, {{&first, &cost}, {&second, &cost}}, clock);
  auto admit = [&] { return admission.Admit(DecodedCall(SmallProblem(64)), {.caller = "a"}); };
  std::optional<absl::StatusOr<AdmittedCall>> inner;
  clock.CallOnce([&] { inner = admit(); });
  auto outer = admit();
  ASSERT_TRUE(outer.ok()) << outer.status();
  ASSERT_TRUE(inner.has_value() && inner->ok()) << inner->status();
  EXPECT_NE(outer->device(), (*inner)->device());
  EXPECT_EQ(admission.DeviceUse(0).calls, 1);
  EXPECT_EQ(admission.DeviceUse(1).calls, 1);
}

TEST_F(AdmissionDevicesTest, KeepsADevicesMemoryUntilItIsDoneWithTheCall) {
  fast_.SetDeviceBytes(1000, 1500);
  slow_.SetDeviceBytes(1000, 1000);
  auto first = Admit(), second = Admit();
  EXPECT_EQ(first->device(), 0);
  EXPECT_EQ(second->device(), 1);  // the fast one has no room
  auto third = Admit();
  EXPECT_EQ(third.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(third.status()), reason::kHbmPressure);
  first->ticket().ReleaseWork();
  EXPECT_EQ(admission_.DeviceUse(0).memory_bytes, 0);
  EXPECT_EQ(Admit()->device(), 0);
}

TEST_F(AdmissionDevicesTest, LeasesADevicesMemoryUntilItsTicketIsGone) {
  fast_.SetDeviceBytes(1000, 1500);
  auto call = Admit();
  Ticket lease = call->ticket().LeaseDeviceMemory(400);
  EXPECT_EQ(admission_.DeviceUse(0).memory_bytes, 600);
  EXPECT_EQ(admission_.DeviceUse(0).lease_bytes, 400);
  lease = Ticket();
  EXPECT_EQ(admission_.DeviceUse(0).lease_bytes, 0);
}

TEST_F(AdmissionDevicesTest, HoldsADevicesMemoryThatNoCallGets) {
  fast_.SetDeviceBytes(1000, 1500);
  slow_.SetDeviceBytes(1000, 1000);
  auto held = admission_.HoldDeviceMemory(0, 500);
  ASSERT_TRUE(held.ok()) << held.status();
  auto call = Admit();
  EXPECT_EQ(call->device(), 0);  // exactly fits
  EXPECT_EQ(ReasonOf(admission_.HoldDeviceMemory(0, 1).status()), reason::kHbmPressure);
  call->ticket().ReleaseWork();
  auto more = admission_.HoldDeviceMemory(0, 1);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(Admit()->device(), 1);
  *held = nullptr;
  EXPECT_EQ(admission_.DeviceUse(0).held_bytes, 1);
  EXPECT_EQ(Admit()->device(), 0);
}

// The device has the memory that it keeps already.
TEST_F(AdmissionDevicesTest, SendsABackwardToTheDeviceThatKeepsItsTensors) {
  slow_.SetDeviceBytes(1000, 1000);
  slow_.KeepResiduals(400);
  const Problem p = SmallProblem(64);
  const auto request = MakeBackward(p, 1, ComputeForward(slow_, p, MakeForward(p, 1)));
  auto admit = [&] {
    CallMemory memory;
    memory.residual_place = 1;
    return admission_.Admit(DecodedRequest(request, Direction::kBackward), {.caller = "a"},
                            std::move(memory));
  };
  auto call = admit();
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->device(), 1);
  EXPECT_EQ(admission_.DeviceUse(1).memory_bytes, 600);
  admission_.Fence(1);
  EXPECT_EQ(admit().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(admit().status()), reason::kLeaseLost);
}

TEST_F(AdmissionDevicesTest, RefusesForGoodWhatTheDeviceNeverHolds) {
  fast_.SetDeviceBytes(1000, 999);
  EXPECT_EQ(Admit()->device(), 1);
  slow_.SetDeviceBytes(1000, 999);
  auto call = Admit();
  EXPECT_EQ(call.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ReasonOf(call.status()), reason::kTooLargeForDevice);
}

TEST_F(AdmissionDevicesTest, LeavesAFencedDeviceOutAndRefusesWhenNoneIsLeft) {
  admission_.Fence(0);
  EXPECT_EQ(Admit()->device(), 1);
  admission_.Fence(1);
  auto call = Admit();
  EXPECT_EQ(call.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(call.status()), reason::kDeviceLost);
  EXPECT_TRUE(RetryAfterOf(call.status()).has_value());
}

}  // namespace
}  // namespace attnd
