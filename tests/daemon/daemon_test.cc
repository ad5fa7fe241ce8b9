// The daemon end to end: a real server on a free port, a generated client. Answers, every error of
// docs/ERRORS.md with its ErrorInfo, deadlines, and cancelling at each stage.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

using Clock = std::chrono::system_clock;

// Calls up to this long are computed by gRPC's threads, others by slots: a mixture.
ServerOptions MixedOptions() {
  ServerOptions options = TestOptions();
  options.worker.inline_time = absl::Microseconds(200);
  return options;
}

// A forward call on a thread of its own.
class AsyncForward {
 public:
  AsyncForward(v1::Attention::Stub& stub, const Problem& problem,
               Clock::time_point deadline = Clock::time_point::max()) {
    context_.set_deadline(deadline);
    thread_ = std::thread([this, &stub, request = MakeForward(problem, 1)] {
      status_ = stub.Forward(&context_, request, &reply_);
    });
  }
  ~AsyncForward() {
    if (thread_.joinable()) thread_.join();
  }
  void Cancel() { context_.TryCancel(); }
  const grpc::Status& Wait() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  const v1::ForwardResponse& reply() const { return reply_; }
  const grpc::ClientContext& context() const { return context_; }

 private:
  grpc::ClientContext context_;
  v1::ForwardResponse reply_;
  grpc::Status status_;
  std::thread thread_;
};

grpc::Status Forward(v1::Attention::Stub& stub, const v1::ForwardRequest& request,
                     v1::ForwardResponse* reply = nullptr, grpc::ClientContext* context = nullptr) {
  v1::ForwardResponse unused_reply;
  grpc::ClientContext own_context;
  return stub.Forward(context != nullptr ? context : &own_context, request,
                      reply != nullptr ? reply : &unused_reply);
}

// Code, reason, domain, and the details that belong to the code.
void ExpectError(const grpc::Status& status, grpc::StatusCode code, const std::string& reason) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  google::rpc::ErrorInfo info = ErrorInfoOf(status);
  EXPECT_EQ(info.reason(), reason) << status.error_message();
  EXPECT_EQ(info.domain(), "attnd");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), static_cast<int>(code));
  EXPECT_EQ(details.message(), status.error_message());
  std::set<std::string> kinds;
  for (const auto& detail : details.details()) kinds.insert(detail.type_url().substr(31));
  EXPECT_EQ(kinds.count("RetryInfo"),
            code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(kinds.count("QuotaFailure"), code == grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(kinds.count("BadRequest"), info.metadata().count("field"));
}

TEST(Daemon, AnswersForwardAndBackwardByteForByteAsItsEngineWhenProblemsAreRandom) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  ReferenceBackend engine;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 10, .max_head_dim = 32});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    v1::ForwardRequest request = MakeForward(problem, seed);
    v1::ForwardResponse expected = ComputeForward(engine, problem, request), got;
    grpc::Status status = Forward(daemon.stub(), request, &got);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(got.o(), expected.o());
    EXPECT_EQ(got.lse(), expected.lse());

    v1::BackwardRequest back = MakeBackward(problem, seed, got);
    v1::BackwardResponse expected_gradients = ComputeBackward(engine, problem, back), gradients;
    grpc::ClientContext context;
    status = daemon.stub().Backward(&context, back, &gradients);
    ASSERT_TRUE(status.ok()) << status.error_message();
    gradients.clear_receipt();
    EXPECT_EQ(gradients.SerializeAsString(), expected_gradients.SerializeAsString());
  }
}

TEST(Daemon, AnswersByteForByteAsTheCpuEngineUnderConcurrentMixedLoad) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), MixedOptions());
  std::unique_ptr<Backend> engine = MakeCpuBackend({.threads = 1});
  struct Case {
    Problem problem;
    v1::ForwardRequest request;
    v1::ForwardResponse expected;
  };
  std::vector<Case> cases;
  for (uint64_t seed = 100; seed < 120; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 14, .max_head_dim = 64});
    v1::ForwardRequest request = MakeForward(problem, seed);
    cases.push_back({problem, request, ComputeForward(*engine, problem, request)});
  }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::unique_ptr<v1::Attention::Stub> stub = daemon.NewStub();
      for (size_t n = 0; n < 3 * cases.size(); ++n) {
        const Case& one = cases[(n * 7 + t * 3) % cases.size()];
        v1::ForwardResponse got;
        grpc::Status status = Forward(*stub, one.request, &got);
        ASSERT_TRUE(status.ok()) << status.error_message();
        EXPECT_EQ(got.o(), one.expected.o()) << ProblemText(one.problem);
        EXPECT_EQ(got.lse(), one.expected.lse()) << ProblemText(one.problem);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Daemon, LeavesLseOutWhenItIsNotWanted) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.set_want_lse(false);
  v1::ForwardResponse reply;
  ASSERT_TRUE(Forward(daemon.stub(), request, &reply).ok());
  EXPECT_TRUE(reply.lse().empty());
  EXPECT_FALSE(reply.o().empty());
}

TEST(Daemon, TellsInTheReceiptWhatRan) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  Problem problem = SmallProblem();
  problem.dropout.threshold = 26;
  v1::ForwardResponse reply;
  ASSERT_TRUE(Forward(daemon.stub(), MakeForward(problem, 1), &reply).ok());
  const v1::Receipt& receipt = reply.receipt();
  EXPECT_EQ(receipt.backend(), "reference");
  EXPECT_FALSE(receipt.device().empty());
  EXPECT_FALSE(receipt.kernel().empty());
  EXPECT_EQ(receipt.accumulate(), v1::ACCUMULATE_FLOAT32);
  EXPECT_FLOAT_EQ(receipt.dropout_p_effective(), 26.0f / 256);
  EXPECT_EQ(receipt.batched_with(), 1u);
  EXPECT_TRUE(receipt.deterministic());
  std::vector<std::string> stages;
  for (const v1::Stage& stage : receipt.stage()) stages.push_back(stage.name());
  EXPECT_EQ(stages, (std::vector<std::string>{"receive", "queue", "h2d", "kernel", "d2h", "send"}));
  EXPECT_GT(receipt.stage(3).nanoseconds(), 0u);
}

TEST(Daemon, DescribesItself) {
  ServerOptions options = TestOptions();
  options.version = "9.9.9";
  options.revision = "abc";
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(daemon.stub().GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.version(), "9.9.9 (abc)");
  EXPECT_EQ(info.boot_epoch().size(), 16u);
  EXPECT_EQ(info.max_message_bytes(), uint64_t{16} << 20);
  ASSERT_EQ(info.device_size(), 1);
  EXPECT_EQ(info.device(0).backend(), "cpu");
  EXPECT_EQ(info.device(0).threads(), 1u);
  EXPECT_TRUE(info.device(0).serving());
  std::set<std::string> features(info.feature().begin(), info.feature().end());
  EXPECT_TRUE(features.count("bias_gradient") && features.count("sink") &&
              features.count("packed"));
}

// ---- Errors, in the order of docs/ERRORS.md.

TEST(DaemonErrors, NamesAFieldAndKeepsTheConnection) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.mutable_problem()->set_kv_heads(3);
  grpc::Status status = Forward(daemon.stub(), request);
  ExpectError(status, grpc::StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  auto metadata = ErrorInfoOf(status).metadata();
  EXPECT_EQ(metadata["field"], "problem.kv_heads");
  EXPECT_EQ(metadata["expected"], "a divisor of q_heads = 2");
  EXPECT_EQ(metadata["got"], "3");
  EXPECT_TRUE(Forward(daemon.stub(), MakeForward(SmallProblem(), 1)).ok());
}

TEST(DaemonErrors, SaysWhichReasonForWhichField) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.mutable_problem()->set_element(static_cast<v1::Element>(7));
  ExpectError(Forward(daemon.stub(), request), grpc::StatusCode::INVALID_ARGUMENT, "BAD_DTYPE");
  request = MakeForward(SmallProblem(), 1);
  request.mutable_problem()->set_softcap(-1);
  ExpectError(Forward(daemon.stub(), request), grpc::StatusCode::INVALID_ARGUMENT, "BAD_FIELD");
  request = MakeForward(SmallProblem(), 1);
  request.mutable_q()->pop_back();
  ExpectError(Forward(daemon.stub(), request), grpc::StatusCode::INVALID_ARGUMENT, "SIZE_MISMATCH");
  request = MakeForward(SmallProblem(), 1);
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(30, 1);
  ExpectError(Forward(daemon.stub(), request), grpc::StatusCode::INVALID_ARGUMENT, "UNKNOWN_FIELD");
}

TEST(DaemonErrors, SaysWhatIsWrongWithAMask) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  v1::MaskSpec& mask = *request.mutable_problem()->mutable_mask();
  mask.set_version(2);
  grpc::Status status = Forward(daemon.stub(), request);
  ExpectError(status, grpc::StatusCode::INVALID_ARGUMENT, "BAD_FIELD");
  EXPECT_EQ((*ErrorInfoOf(status).mutable_metadata())["field"], "problem.mask.version");
  mask.Clear();
  mask.set_id(std::string(32, 'x'));
  ExpectError(Forward(daemon.stub(), request), grpc::StatusCode::FAILED_PRECONDITION,
              "MASK_UNKNOWN");
}

TEST(DaemonErrors, PassesOnWhatTheEngineCannotDo) {
  GatedDaemon gated;
  gated.engine->RefuseWith(absl::UnimplementedError("problem.element: float32 is not built in"));
  grpc::Status status = Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1));
  ExpectError(status, grpc::StatusCode::UNIMPLEMENTED, "PROBLEM_UNSUPPORTED");
}

TEST(DaemonErrors, RefusesWhatTheDeviceCanNeverHold) {
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = 1 << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  grpc::Status status = Forward(daemon.stub(), MakeForward(SmallProblem(8192, 1), 1));
  ExpectError(status, grpc::StatusCode::OUT_OF_RANGE, "TOO_LARGE_FOR_DEVICE");
  EXPECT_EQ((*ErrorInfoOf(status).mutable_metadata())["limit"], "1048576");
}

TEST(DaemonErrors, RefusesAReplyAboveTheMessageLimit) {
  ServerOptions options = TestOptions();
  options.transport.max_message_bytes = 1 << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  Problem problem = SmallProblem(2048, 1);  // q of one number a row, o of 256
  problem.kv_len = 1;
  problem.qk_head_dim = 1;
  problem.v_head_dim = 256;
  ExpectError(Forward(daemon.stub(), MakeForward(problem, 1)), grpc::StatusCode::OUT_OF_RANGE,
              "REPLY_TOO_LARGE");
}

TEST(DaemonErrors, LetsGrpcRefuseAnOversizedMessageAndGoesOn) {
  ServerOptions options = TestOptions();
  options.transport.max_message_bytes = 1 << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.set_q(std::string(2 << 20, 'x'));
  EXPECT_EQ(Forward(daemon.stub(), request).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Forward(daemon.stub(), MakeForward(SmallProblem(), 1)).ok());
}

TEST(DaemonErrors, RefusesWhenFullAndSaysWhenToComeBack) {
  ServerOptions options = TestOptions();
  options.admission.max_calls = 1;
  GatedDaemon gated(options);
  gated.engine->Close();
  AsyncForward first(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  grpc::ClientContext context;
  grpc::Status status =
      Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1), nullptr, &context);
  ExpectError(status, grpc::StatusCode::UNAVAILABLE, "QUEUE_FULL");
  auto pushback = context.GetServerTrailingMetadata().find("grpc-retry-pushback-ms");
  ASSERT_NE(pushback, context.GetServerTrailingMetadata().end());
  int milliseconds = 0;
  EXPECT_TRUE(absl::SimpleAtoi(absl::string_view(pushback->second.data(), pushback->second.size()),
                               &milliseconds));
  EXPECT_GT(milliseconds, 0);
  gated.engine->Open();
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1)).ok());
}

TEST(DaemonErrors, RefusesWhenMemoryIsTaken) {
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = 1 << 20;
  GatedDaemon gated(options);
  gated.engine->Close();
  AsyncForward first(gated.daemon->stub(), SmallProblem(2048, 2));  // 528 KiB
  gated.WaitForLaunches(1);
  ExpectError(Forward(gated.daemon->stub(), MakeForward(SmallProblem(2048, 2), 1)),
              grpc::StatusCode::UNAVAILABLE, "MEMORY_PRESSURE");
  gated.engine->Open();
  EXPECT_TRUE(first.Wait().ok());
}

TEST(DaemonErrors, RefusesWhatIsAboveTheCallersQuota) {
  ServerOptions options = TestOptions();
  options.admission.caller_max_calls = 1;
  GatedDaemon gated(options);
  gated.engine->Close();
  AsyncForward first(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  grpc::Status status = Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1));
  ExpectError(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_QUOTA");
  EXPECT_EQ((*ErrorInfoOf(status).mutable_metadata())["caller"], "127.0.0.1");
  gated.engine->Open();
  EXPECT_TRUE(first.Wait().ok());
}

TEST(DaemonErrors, RefusesADeadlineThatItCannotMeet) {
  GatedDaemon gated;  // estimates 1 GFLOP/s until it has learned
  gated.engine->Close();
  AsyncForward first(gated.daemon->stub(), SmallProblem(4096, 4));
  gated.WaitForLaunches(1);
  grpc::ClientContext context;
  context.set_deadline(Clock::now() + std::chrono::milliseconds(400));
  grpc::Status status =
      Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1), nullptr, &context);
  ExpectError(status, grpc::StatusCode::DEADLINE_EXCEEDED, "DEADLINE_UNMEETABLE");
  first.Cancel();
  first.Wait();
}

TEST(DaemonErrors, ReportsAFailedEngine) {
  GatedDaemon gated;
  gated.engine->FailWith(absl::InternalError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"));
  ExpectError(Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1)),
              grpc::StatusCode::INTERNAL, "ENGINE_FAILED");
  gated.engine->FailWith(absl::OkStatus());
  EXPECT_TRUE(Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1)).ok());
}

TEST(DaemonErrors, EndsACallWithoutDeadlineAtTheServersCap) {
  ServerOptions options = TestOptions();
  options.admission.max_deadline = absl::Milliseconds(100);
  GatedDaemon gated(options);
  gated.engine->Close();
  grpc::Status status = Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1));
  ExpectError(status, grpc::StatusCode::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED_IN_KERNEL");
}

TEST(DaemonErrors, EndsAQueuedCallAtTheServersCap) {
  ServerOptions options = TestOptions();
  options.admission.max_deadline = absl::Milliseconds(200);
  options.worker.slots = 1;
  GatedDaemon gated(options);
  gated.engine->Close();
  AsyncForward first(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  AsyncForward second(gated.daemon->stub(), SmallProblem());
  // The first reaches its cap in the kernel, which frees the slot; the second was admitted later
  // and is still waiting or just taken.
  EXPECT_EQ(first.Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(second.Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  WaitUntilAllIsGivenBack(*gated.daemon);
}

// ---- Cancelling at each stage, and deadlines.

TEST(DaemonCancel, GivesEverythingBackWhenCancelledInTheKernel) {
  GatedDaemon gated;
  gated.engine->Close();
  AsyncForward call(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  call.Cancel();
  EXPECT_EQ(call.Wait().error_code(), grpc::StatusCode::CANCELLED);
  WaitUntilAllIsGivenBack(*gated.daemon);  // although the gate never opened
  gated.engine->Open();
  EXPECT_TRUE(Forward(gated.daemon->stub(), MakeForward(SmallProblem(), 1)).ok());
}

TEST(DaemonCancel, NeverLaunchesACallThatWasCancelledInTheQueue) {
  ServerOptions options = TestOptions();
  options.worker.slots = 1;
  GatedDaemon gated(options);
  gated.engine->Close();
  AsyncForward running(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  AsyncForward waiting(gated.daemon->stub(), SmallProblem(24));
  gated.WaitForCalls(2);
  waiting.Cancel();
  EXPECT_EQ(waiting.Wait().error_code(), grpc::StatusCode::CANCELLED);
  while (gated.daemon->server().use().calls != 1) std::this_thread::yield();
  gated.engine->Open();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_EQ(gated.launches(), 1);
}

TEST(DaemonCancel, DropsACallThatWasCancelledWhileTheEngineServedAnother) {
  GatedDaemon gated;  // the second call has landed and waits for the engine
  gated.engine->Close();
  AsyncForward running(gated.daemon->stub(), SmallProblem());
  gated.WaitForLaunches(1);
  AsyncForward landed(gated.daemon->stub(), SmallProblem(24));
  gated.WaitForCalls(2);
  landed.Cancel();
  EXPECT_EQ(landed.Wait().error_code(), grpc::StatusCode::CANCELLED);
  // The daemon hears of it before it hears of a later call on the same connection, but acts on it
  // on another thread: many calls later.
  for (int n = 0; n < 200; ++n) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    ASSERT_TRUE(gated.daemon->stub().GetServerInfo(&context, {}, &info).ok());
  }
  gated.engine->Open();
  EXPECT_TRUE(running.Wait().ok());
  WaitUntilAllIsGivenBack(*gated.daemon);
  EXPECT_EQ(gated.launches(), 1);
}

TEST(DaemonCancel, EndsTheKernelWhenTheClientsDeadlinePasses) {
  GatedDaemon gated;
  gated.engine->Close();
  AsyncForward call(gated.daemon->stub(), SmallProblem(),
                    Clock::now() + std::chrono::milliseconds(300));
  EXPECT_EQ(call.Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  WaitUntilAllIsGivenBack(*gated.daemon);
}

// A thousand calls, cancelled at random points, beside another caller whose answers stay the same.
TEST(DaemonCancel, GivesEverythingBackWhenAThousandCallsAreCancelledAtRandomPoints) {
  constexpr int kThreads = 4, kCalls = 250;
  Daemon daemon(MakeCpuBackend({.threads = 2}), MixedOptions());
  const v1::ForwardRequest request = MakeForward(SmallProblem(100), 7);
  v1::ForwardResponse expected;
  ASSERT_TRUE(Forward(daemon.stub(), request, &expected).ok());
  std::vector<std::thread> threads;
  std::atomic<int> storming = kThreads, cancelled = 0;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::unique_ptr<v1::Attention::Stub> stub = daemon.NewStub();
      Random random(t);
      for (int n = 0; n < kCalls; ++n) {
        AsyncForward call(*stub, SmallProblem(random.Between(1, 512)));
        for (int64_t spin = random.Between(0, 2000); spin > 0; --spin) std::this_thread::yield();
        call.Cancel();
        const grpc::StatusCode code = call.Wait().error_code();
        EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED) << code;
        cancelled += code == grpc::StatusCode::CANCELLED;
      }
      --storming;
    });
  }
  while (storming > 0) {
    v1::ForwardResponse beside;
    EXPECT_TRUE(Forward(daemon.stub(), request, &beside).ok());
    EXPECT_TRUE(beside.o() == expected.o());
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(cancelled, 0);

  std::deque<AsyncForward> burst;  // all at once, for how soon it is
  for (int n = 0; n < 50; ++n) burst.emplace_back(daemon.stub(), SmallProblem(3000));
  const absl::Time begin = absl::Now();  // a fast machine may never have so many at once
  while (daemon.server().use().calls < 20 && absl::Now() < begin + absl::Seconds(1)) {
    std::this_thread::yield();
  }
  for (AsyncForward& call : burst) call.Cancel();
  const absl::Time last_cancel = absl::Now();
  auto all_back = [&] {
    return daemon.server().use().bytes == 0 && daemon.server().staging_used() == 0;
  };
  while (!all_back() && absl::Now() < last_cancel + absl::Seconds(30)) std::this_thread::yield();
  EXPECT_TRUE(all_back());
  RecordProperty("microseconds_until_all_memory_was_back",
                 static_cast<int>(absl::ToInt64Microseconds(absl::Now() - last_cancel)));
  RecordProperty("cancelled", cancelled.load());
  for (AsyncForward& call : burst) call.Wait();
}

v1::ForwardRequest MakeCapturing(int64_t length, bool keep, const std::string& previous = "") {
  v1::ForwardRequest request = MakeForward(SmallProblem(length), 1);
  request.mutable_capture()->set_block(4);
  request.mutable_capture()->set_keep(keep);
  request.mutable_capture()->set_previous(previous);
  return request;
}

TEST(Daemon, KeepsMapsForTheNextCallAndForPatterns) {
  Daemon daemon(ReferenceDevice());
  v1::ForwardResponse first, next;
  ASSERT_TRUE(Forward(daemon.stub(), MakeCapturing(16, true), &first).ok());
  const std::string token = first.captured().token();
  EXPECT_FALSE(first.captured().has_distance());
  EXPECT_NEAR(first.captured().mean(), 1.0 / 16, 1e-6);
  ASSERT_TRUE(Forward(daemon.stub(), MakeCapturing(16, false, token), &next).ok());
  EXPECT_TRUE(next.captured().has_distance());
  EXPECT_EQ(next.captured().distance(), 0);
  EXPECT_EQ(next.captured().token(), "");

  const auto build = [&](const std::string& of, const std::string& pooled, uint32_t block,
                         v1::BuildPatternResponse& reply) {
    v1::BuildPatternRequest request;
    request.set_token(of);
    request.set_pooled(pooled);
    request.set_block(block);
    request.mutable_top_k()->set_density(0.5);
    grpc::ClientContext context;
    return daemon.stub().BuildPattern(&context, request, &reply);
  };
  v1::BuildPatternResponse of_kept, of_pooled;
  ASSERT_TRUE(build(token, "", 4, of_kept).ok());
  ASSERT_TRUE(build("", first.captured().pooled(), 4, of_pooled).ok());
  EXPECT_EQ(of_kept.SerializeAsString(), of_pooled.SerializeAsString());

  const auto release = [&](int count) {
    v1::ReleaseCaptureRequest request;
    v1::ReleaseCaptureResponse reply;
    for (int n = 0; n < count; ++n) request.add_tokens(token);
    grpc::ClientContext context;
    return daemon.stub().ReleaseCapture(&context, request, &reply);
  };
  const auto field = [](const grpc::Status& status) {
    return ErrorInfoOf(status).metadata().at("field");
  };
  EXPECT_EQ(field(build(token, first.captured().pooled(), 4, of_kept)), "pooled");
  EXPECT_EQ(field(build(token, "", 0, of_kept)), "block");
  EXPECT_EQ(field(Forward(daemon.stub(), MakeCapturing(8, false, token))), "capture.previous");
  EXPECT_EQ(field(release(1025)), "tokens");
  EXPECT_TRUE(release(1).ok());
  ExpectError(build(token, "", 4, of_kept), grpc::StatusCode::FAILED_PRECONDITION, "CAPTURE_LOST");
}

}  // namespace
}  // namespace attnd
