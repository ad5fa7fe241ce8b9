#include "server/schedule/device_worker.h"

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/call/status_details.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

class DeviceWorkerTest : public testing::Test {
 protected:
  DeviceWorkerTest()
      : staging_(*StagingPool::Create(int64_t{16} << 20)),
        cost_(1e9),
        admission_({.memory_bytes = int64_t{16} << 20}, backend_, cost_, clock_) {
    metrics_.AddDevice("gated", backend_.info());
    Restart({});
  }

  void Restart(const DeviceWorkerOptions& options) {
    worker_.reset();
    worker_ = std::make_unique<DeviceWorker>(DeviceWorkerDeps{backend_, cost_, metrics_, clock_},
                                             options);
  }
  // Submits a call and returns its id.
  uint64_t Submit(KeptAnswer& answer, int64_t length = 16,
                  absl::Time deadline = absl::InfiniteFuture(), const std::string& caller = "a") {
    uint64_t id = ++ids_;
    auto call = admission_.Admit(DecodedCall(SmallProblem(length)), {.id = id,
                                                                     .caller = caller,
                                                                     .deadline = deadline,
                                                                     .received_at = clock_.Now(),
                                                                     .sink = &answer});
    worker_->Submit(Landed(std::move(call), staging_));
    return id;
  }
  std::string Output(const KeptAnswer& answer, Result& result, int tensor, int64_t bytes) {
    (void)answer;
    return std::string(reinterpret_cast<const char*>(result.output(tensor)),
                       static_cast<size_t>(bytes));
  }
  void ExpectAllGivenBack() {
    EXPECT_EQ(admission_.Use().bytes, 0);
    EXPECT_EQ(admission_.Use().calls, 0);
    EXPECT_EQ(staging_.used(), 0);
  }

  RealClock clock_;
  GatedBackend backend_;
  Metrics metrics_;
  StagingPool staging_;
  CostModel cost_;
  Admission admission_;
  uint64_t ids_ = 0;
  std::unique_ptr<DeviceWorker> worker_;
};

TEST_F(DeviceWorkerTest, AnswersWithTheEnginesResult) {
  KeptAnswer answer;
  Submit(answer);
  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait();
  Problem problem = SmallProblem();
  v1::ForwardResponse expected = ComputeForward(backend_, problem, MakeForward(problem, 1));
  EXPECT_EQ(Output(answer, answer.result(), Tensor::kO, problem.OutputElements() * 4),
            expected.o());
  EXPECT_EQ(Output(answer, answer.result(), Tensor::kLse, problem.LseElements() * 4),
            expected.lse());
  const CallTimes& times = answer.result().times();
  EXPECT_LE(times.received, times.admitted);
  EXPECT_LE(times.admitted, times.landed);
  EXPECT_LE(times.landed, times.taken);
  EXPECT_LE(times.taken, times.kernel_begin);
  EXPECT_LE(times.kernel_begin, times.kernel_end);
  answer.DropResult();
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, KeepsOnlyTheReplysMemoryOnceComputed) {
  KeptAnswer answer;
  Submit(answer);
  answer.Wait();
  EXPECT_EQ(staging_.used(), 1024 + 128);
  EXPECT_EQ(admission_.Use().bytes, 1024 + 128);
  EXPECT_EQ(admission_.Use().calls, 0);
  answer.DropResult();
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, BatchesWhatWaitsAndGivesTheSameBits) {
  Restart({.slots = 1});
  backend_.Close();
  KeptAnswer first, answers[4];
  Submit(first);
  backend_.WaitForLaunches(1);
  for (KeptAnswer& answer : answers) Submit(answer);
  backend_.Open();
  first.Wait();
  Problem problem = SmallProblem();
  std::string alone = Output(first, first.result(), Tensor::kO, problem.OutputElements() * 4);
  for (KeptAnswer& answer : answers) {
    ASSERT_TRUE(answer.Wait().ok());
    EXPECT_EQ(Output(answer, answer.result(), Tensor::kO, problem.OutputElements() * 4), alone);
    EXPECT_EQ(answer.result().batched_with(), 4);
  }
  EXPECT_EQ(backend_.launches(), (std::vector<std::vector<int64_t>>{{16}, {16, 16, 16, 16}}));
}

TEST_F(DeviceWorkerTest, GivesMemoryBackAtOnceWhenACallIsCancelledInTheQueue) {
  Restart({.slots = 1});
  backend_.Close();
  KeptAnswer running, waiting;
  Submit(running);
  backend_.WaitForLaunches(1);
  int64_t before = admission_.Use().bytes;
  uint64_t id = Submit(waiting);
  worker_->Cancel(id, StopCause::kCancelled);
  EXPECT_EQ(waiting.answers(), 1);  // answered inside Cancel
  EXPECT_EQ(waiting.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(absl::StrContains(waiting.Wait().message(), "queue"));
  EXPECT_EQ(ReasonOf(waiting.Wait()), reason::kCancelled);
  EXPECT_EQ(admission_.Use().bytes, before);
  backend_.Open();
  running.Wait();
}

TEST_F(DeviceWorkerTest, EndsAKernelEarlyWhenItsCallIsCancelled) {
  backend_.Close();  // it never opens: only the stop token ends the launch
  KeptAnswer answer;
  uint64_t id = Submit(answer);
  backend_.WaitForLaunches(1);
  worker_->Cancel(id, StopCause::kCancelled);
  EXPECT_EQ(answer.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReasonOf(answer.Wait()), reason::kCancelled);
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, LetsTheRestOfABatchGoOnWhenOneIsCancelledInTheKernel) {
  Restart({.slots = 1});
  backend_.Close();
  KeptAnswer blocker, stays, goes;
  Submit(blocker);
  backend_.WaitForLaunches(1);
  Submit(stays);
  uint64_t id = Submit(goes);
  backend_.Open();
  blocker.Wait();
  stays.Wait();
  goes.Wait();
  backend_.Close();
  KeptAnswer blocker2, stays2, goes2;
  Submit(blocker2);
  backend_.WaitForLaunches(3);
  Submit(stays2);
  id = Submit(goes2);
  worker_->Cancel(id, StopCause::kCancelled);
  backend_.Open();
  EXPECT_TRUE(stays2.Wait().ok());
  EXPECT_EQ(goes2.Wait().code(), absl::StatusCode::kCancelled);
  blocker2.Wait();
}

TEST_F(DeviceWorkerTest, AnswersInTheQueueWhenTheDeadlinePasses) {
  Restart({.slots = 1});
  backend_.Close();
  KeptAnswer running, waiting;
  Submit(running);
  backend_.WaitForLaunches(1);
  Submit(waiting, 16, clock_.Now() + absl::Milliseconds(20));
  absl::Status status = waiting.Wait();  // although the engine is still held
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(status), reason::kDeadlineExceededQueue);
  backend_.Open();
  running.Wait();
}

TEST_F(DeviceWorkerTest, EndsAKernelWhenTheDeadlinePasses) {
  backend_.Close();
  KeptAnswer answer;
  Submit(answer, 16, clock_.Now() + absl::Milliseconds(50));
  absl::Status status = answer.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, IgnoresACancelAfterTheAnswer) {
  KeptAnswer answer;
  uint64_t id = Submit(answer);
  answer.Wait();
  worker_->Cancel(id, StopCause::kCancelled);
  worker_->Cancel(12345, StopCause::kCancelled);
  EXPECT_EQ(answer.answers(), 1);
}

TEST_F(DeviceWorkerTest, ReportsAFailedLaunchToEachOfItsCalls) {
  backend_.FailWith(absl::InternalError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"));
  KeptAnswer a, b;
  Submit(a);
  Submit(b);
  for (KeptAnswer* answer : {&a, &b}) {
    EXPECT_EQ(answer->Wait().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(ReasonOf(answer->Wait()), reason::kEngineFailed);
  }
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, AnswersEverybodyWhenItIsDestroyed) {
  Restart({.slots = 1});
  backend_.Close();
  KeptAnswer running, waiting;
  Submit(running);
  backend_.WaitForLaunches(1);
  Submit(waiting);
  worker_.reset();
  EXPECT_EQ(running.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(waiting.Wait().code(), absl::StatusCode::kCancelled);
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, ComputesASmallCallInsideSubmitWhenNothingIsInWork) {
  Restart({.inline_time = absl::Seconds(1)});
  for (int n = 0; n < 2; ++n) {
    KeptAnswer answer;
    Submit(answer);
    EXPECT_EQ(answer.answers(), 1);
    EXPECT_TRUE(answer.Wait().ok());
  }
  ExpectAllGivenBack();
}

TEST_F(DeviceWorkerTest, LeavesALongCallToASlot) {
  Restart({.inline_time = absl::Nanoseconds(1)});
  backend_.Close();  // inside Submit it would stay for ever
  KeptAnswer answer;
  Submit(answer);
  EXPECT_EQ(answer.answers(), 0);
  backend_.Open();
  EXPECT_TRUE(answer.Wait().ok());
}

TEST_F(DeviceWorkerTest, LeavesASmallCallToASlotWhenAnotherIsInWork) {
  Restart({.slots = 2, .inline_time = absl::Seconds(1)});
  backend_.Close();
  KeptAnswer first, second, third;
  std::thread caller([&] { Submit(first); });
  backend_.WaitForLaunches(1);
  Submit(second);
  backend_.WaitForLaunches(2);
  Submit(third);  // beyond both slots, of which the first caller's thread is one
  EXPECT_EQ(worker_->queued(), 1u);
  backend_.Open();
  caller.join();
  for (KeptAnswer* answer : {&first, &second, &third}) EXPECT_TRUE(answer->Wait().ok());
}

TEST_F(DeviceWorkerTest, EndsAnInlineLaunchWhenItsCallIsCancelledOrTheWorkerGoes) {
  Restart({.inline_time = absl::Seconds(1)});
  backend_.Close();
  for (bool destroy : {false, true}) {
    KeptAnswer answer;
    std::thread caller([&] { Submit(answer); });
    backend_.WaitForLaunches(destroy ? 2 : 1);
    if (destroy) {
      worker_.reset();
    } else {
      worker_->Cancel(ids_, StopCause::kCancelled);
    }
    caller.join();
    EXPECT_EQ(answer.Wait().code(), absl::StatusCode::kCancelled);
  }
  ExpectAllGivenBack();
}

// Closes the engine's gate behind the launch that it answers.
class GateClosingAnswer final : public ReplySink {
 public:
  explicit GateClosingAnswer(GatedBackend& backend) : backend_(backend) {}
  void OnResult(absl::StatusOr<Result> result) override {
    backend_.Close();
    kept_.OnResult(std::move(result));
  }
  KeptAnswer& kept() { return kept_; }

 private:
  GatedBackend& backend_;
  KeptAnswer kept_;
};

TEST(DeviceWorkerPace, IsWhatTheNextLaunchTakesWhileMoreWait) {
  FakeClock clock(absl::Now() + absl::Hours(1));
  GatedBackend backend;
  Metrics metrics;
  metrics.AddDevice("gated", backend.info());
  StagingPool staging = *StagingPool::Create(int64_t{16} << 20);
  CostModel cost(1e9);
  Admission admission({.memory_bytes = int64_t{16} << 20}, backend, cost, clock);
  DeviceWorker worker({backend, cost, metrics, clock}, {.batcher = {.max_calls = 1}, .slots = 1});
  GateClosingAnswer first(backend), second(backend);
  KeptAnswer third;
  backend.Close();
  uint64_t id = 0;
  double seconds = 0;
  for (ReplySink* sink : std::initializer_list<ReplySink*>{&first, &second, &third}) {
    auto call =
        admission.Admit(DecodedCall(SmallProblem()),
                        {.id = ++id, .caller = "a", .received_at = clock.Now(), .sink = sink});
    ASSERT_TRUE(call.ok()) << call.status();
    seconds = call->seconds();
    worker.Submit(Landed(std::move(call), staging));
  }
  backend.WaitForLaunches(1);
  clock.Advance(absl::Seconds(7));  // nobody knows since when it has worked on the first
  backend.Open();
  backend.WaitForLaunches(2);
  EXPECT_DOUBLE_EQ(cost.pace(), 1);
  clock.Advance(absl::Seconds(1000 * seconds));
  backend.Open();
  backend.WaitForLaunches(3);
  const double after_second = cost.pace();
  EXPECT_GT(after_second, 1.5);
  EXPECT_LT(after_second, 10);  // doubted after one
  backend.Open();
  EXPECT_TRUE(third.Wait().ok());
  EXPECT_TRUE(first.kept().Wait().ok() && second.kept().Wait().ok());
}

class DeviceWorkerRaceTest : public DeviceWorkerTest, public testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(OnSlotsAndInline, DeviceWorkerRaceTest, testing::Bool());

TEST_P(DeviceWorkerRaceTest, AnswersEachCallOnceWhenCancelsRace) {
  Restart({.inline_time = GetParam() ? absl::Seconds(1) : absl::ZeroDuration()});
  constexpr int kCalls = 300;
  std::vector<std::unique_ptr<KeptAnswer>> answers;
  for (int n = 0; n < kCalls; ++n) answers.push_back(std::make_unique<KeptAnswer>());
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int n = t; n < kCalls; n += 3) {
        auto call =
            admission_.Admit(DecodedCall(SmallProblem(4)), {.id = 10000 + static_cast<uint64_t>(n),
                                                            .caller = "a",
                                                            .received_at = clock_.Now(),
                                                            .sink = answers[n].get()});
        worker_->Submit(Landed(std::move(call), staging_));
        worker_->Cancel(10000 + static_cast<uint64_t>(n * 7 % kCalls), StopCause::kCancelled);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& answer : answers) {
    answer->Wait();
    answer->DropResult();
  }
  for (auto& answer : answers) EXPECT_EQ(answer->answers(), 1);
  ExpectAllGivenBack();
}

}  // namespace
}  // namespace attnd
