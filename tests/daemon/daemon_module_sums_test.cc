// SumGradients of a daemon whose engine is a stand-in that succeeds or fails as told: who may call
// it with what, that it counts once, and what a failure leaves behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/module_caller.h"
#include "tests/fixtures/connected_engine.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr int64_t kMemoryOfModules = int64_t{8} << 20;

class DaemonModuleSums : public ::testing::Test {
 protected:
  static ServerOptions Options() {
    ServerOptions options = TestOptions();
    options.modules.memory = {kMemoryOfModules, kMemoryOfModules};
    return options;
  }

  // With its weights put: at sequence 1. kept_rows 0: not trained.
  std::string Ready(ModuleCaller& caller, uint64_t kept_rows = 64) {
    v1::RegisterModuleRequest request = SmallRegistration("m");
    request.mutable_limits()->set_kept_rows(kept_rows);
    v1::RegisterModuleResponse registered;
    EXPECT_TRUE(caller.Register(request, registered).ok());
    nccl_version_ = registered.plan().nccl_version();
    v1::PutTensorsResponse put;
    const auto bytes = [this](int64_t count) { return RandomBytes(random_, count); };
    EXPECT_TRUE(caller.Put(PutMessages(registered.token(), 0, bytes), put).ok());
    return registered.token();
  }
  static v1::SumGradientsRequest SumOf(const std::string& token, uint32_t micro_batch = 0) {
    v1::SumGradientsRequest request;
    request.set_token(token);
    request.set_sequence(1);
    request.set_micro_batch(micro_batch);
    request.set_replicas(2);
    request.set_group(std::string(128, 'g'));
    return request;
  }
  grpc::Status Sum(const v1::SumGradientsRequest& request) {
    return caller_.Call(&v1::Modules::Stub::SumGradients, request, response_);
  }
  uint32_t MicroBatches(const std::string& token) {
    const v1::ModuleStatus status = caller_.Status(token);
    return status.micro_batches_size() == 0 ? 0 : status.micro_batches(1);
  }

  Random random_{1};
  ConnectedScript script_;
  Daemon daemon_{ConnectedDevice(script_), Options()};
  ModuleCaller caller_{daemon_.NewChannel()};
  v1::SumGradientsResponse response_;
  uint32_t nccl_version_ = 0;
};

TEST_F(DaemonModuleSums, CountOnceHoweverOftenTheyAreAskedFor) {
  const std::string token = Ready(caller_);
  EXPECT_EQ(nccl_version_, 22304);
  ASSERT_TRUE(Sum(SumOf(token)).ok());
  EXPECT_FALSE(response_.replayed());
  v1::SumGradientsRequest again = SumOf(token);
  again.set_group(std::string(128, 'h'));  // whichever group asks
  ASSERT_TRUE(Sum(again).ok());
  EXPECT_TRUE(response_.replayed());
  EXPECT_EQ(script_.sums, 1);
  EXPECT_EQ(script_.taken, 1);
  EXPECT_EQ(MicroBatches(token), 1);
  again.set_replica(1);
  EXPECT_EQ(ReasonOf(Sum(again)), "MICRO_BATCH_CONFLICT");
  v1::StepResponse step;
  EXPECT_TRUE(caller_.Step(StepOf(token, 1, 1), step).ok());
}

TEST_F(DaemonModuleSums, BeginWithAGroupOfReplicaZeroAndMemory) {
  const std::string token = Ready(caller_);
  const int64_t before = daemon_.server().module_bytes();
  v1::SumGradientsRequest request = SumOf(token);
  request.clear_group();
  ASSERT_TRUE(Sum(request).ok());
  EXPECT_EQ(response_.group(), std::string(128, 'g'));
  EXPECT_EQ(daemon_.server().module_bytes(), before + script_.bytes);
  request.set_replica(1);
  ASSERT_TRUE(Sum(request).ok());
  EXPECT_EQ(response_.group(), "");
  EXPECT_EQ(script_.sums, 0);
  EXPECT_EQ(MicroBatches(token), 0);
  script_.bytes = kMemoryOfModules;
  EXPECT_EQ(ReasonOf(Sum(request)), "MODULE_QUOTA");
  EXPECT_EQ(daemon_.server().module_bytes(), before);
}

TEST_F(DaemonModuleSums, LeaveGradientsAndGiveMemoryBackWhenTheExchangeFails) {
  const std::string token = Ready(caller_);
  const int64_t before = daemon_.server().module_bytes();
  script_.sum = [](const ReplicaCall&) { return absl::InternalError("ncclResult 6"); };
  const grpc::Status failed = Sum(SumOf(token));
  EXPECT_EQ(failed.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonOf(failed), "SUM_FAILED");
  EXPECT_NE(failed.error_message().find("ncclResult 6"), std::string::npos);
  EXPECT_EQ(script_.taken, 0);
  EXPECT_EQ(MicroBatches(token), 0);
  EXPECT_EQ(daemon_.server().module_bytes(), before);
  script_.sum = nullptr;
  EXPECT_TRUE(Sum(SumOf(token)).ok());
  EXPECT_EQ(MicroBatches(token), 1);
}

TEST_F(DaemonModuleSums, HaveADeadlineOfTheirOwnWithinTheCalls) {
  const std::string token = Ready(caller_);
  absl::Duration left;
  script_.sum = [&](const ReplicaCall& call) {
    EXPECT_EQ(call.group, std::string(128, 'g'));
    EXPECT_EQ(call.replica, 1);
    EXPECT_EQ(call.replicas, 3);
    left = call.deadline - absl::Now();
    return absl::DeadlineExceededError("no answer");
  };
  v1::SumGradientsRequest request = SumOf(token);
  request.set_replicas(3);
  request.set_replica(1);
  request.set_timeout_ms(90'000);
  EXPECT_EQ(ReasonOf(Sum(request)), "SUM_FAILED");
  EXPECT_LE(left, absl::Seconds(90));
  EXPECT_GT(left, absl::Seconds(30));
}

TEST_F(DaemonModuleSums, RefuseNumbersAndGroupsThatCannotBe) {
  const std::string token = Ready(caller_);
  const auto refused = [&](const std::function<void(v1::SumGradientsRequest&)>& spoil) {
    v1::SumGradientsRequest request = SumOf(token);
    spoil(request);
    const grpc::Status status = Sum(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    return ErrorInfoOf(status).metadata().at("field");
  };
  using Request = v1::SumGradientsRequest;
  EXPECT_EQ(refused([](Request& r) { r.set_replicas(1); }), "replicas");
  EXPECT_EQ(refused([](Request& r) { r.set_replicas(65); }), "replicas");
  EXPECT_EQ(refused([](Request& r) { r.set_replica(2); }), "replica");
  EXPECT_EQ(refused([](Request& r) { r.set_group(std::string(127, 'g')); }), "group");
  EXPECT_EQ(refused([](Request& r) { r.set_group(std::string(129, 'g')); }), "group");
  v1::SumGradientsRequest request = SumOf(token);
  request.set_sequence(2);
  EXPECT_EQ(ReasonOf(Sum(request)), "SEQUENCE_MISMATCH");
  EXPECT_EQ(script_.sums, 0);
}

TEST_F(DaemonModuleSums, AreTheOwnersAlone) {
  ServerOptions options = Options();
  options.token_file = absl::StrCat(testing::TempDir(), "/sum_tokens_", getpid());
  std::ofstream(options.token_file) << "alice aaaabbbbccccdddd\nbob bbbbccccddddeeee\n";
  Daemon daemon(ConnectedDevice(script_), options);
  ModuleCaller alice(daemon.NewChannel(), "aaaabbbbccccdddd");
  ModuleCaller bob(daemon.NewChannel(), "bbbbccccddddeeee");
  v1::SumGradientsRequest request = SumOf(Ready(alice));
  EXPECT_EQ(ReasonOf(bob.Call(&v1::Modules::Stub::SumGradients, request, response_)),
            "MODULE_NOT_OWNED");
  EXPECT_EQ(script_.sums, 0);
  EXPECT_TRUE(alice.Call(&v1::Modules::Stub::SumGradients, request, response_).ok());
}

TEST_F(DaemonModuleSums, AreRefusedWhereNothingConnectsTheModule) {
  EXPECT_EQ(ReasonOf(Sum(SumOf(Ready(caller_, 0)))), "MODULE_UNSUPPORTED");  // no gradients
  EXPECT_EQ(nccl_version_, 0);
  Daemon alone(ReferenceDevice(), Options());
  ModuleCaller caller(alone.NewChannel());
  const v1::SumGradientsRequest request = SumOf(Ready(caller));
  EXPECT_EQ(nccl_version_, 0);
  const grpc::Status status = caller.Call(&v1::Modules::Stub::SumGradients, request, response_);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(ReasonOf(status), "MODULE_UNSUPPORTED");
}

}  // namespace
}  // namespace attnd
