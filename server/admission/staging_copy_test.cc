#include "server/admission/staging_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>

#include "kernels/reference_backend.h"
#include "server/call/status_details.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

class LandingTest : public testing::Test {
 protected:
  LandingTest() : cost_(1e9), admission_({}, backend_, cost_, clock_) {}

  AdmittedCall Admitted(const Problem& problem) {
    auto call = admission_.Admit(DecodedCall(problem, Priority::kNormal, 5), {.id = 1});
    CHECK(call.ok()) << call.status();
    return *std::move(call);
  }
  void ExpectEqual(const AdmittedCall& call, int tensor, const std::string& expected) {
    EXPECT_EQ(std::memcmp(call.staged()[tensor], expected.data(), expected.size()), 0)
        << "tensor " << tensor;
  }

  RealClock clock_;
  ReferenceBackend backend_;
  CostModel cost_;
  Admission admission_;
};

TEST_F(LandingTest, PutsEachTensorInItsPlace) {
  for (int64_t length : {3, 40000}) {  // through the caches, and past them
    StagingPool staging = *StagingPool::Create(int64_t{64} << 20);
    Problem problem = SmallProblem(length);
    v1::ForwardRequest request = MakeForward(problem, 5);
    AdmittedCall call = Admitted(problem);
    ASSERT_TRUE(TakePlaces(call, staging).ok());
    EXPECT_EQ(Land(call), 3 * request.q().size());
    ExpectEqual(call, Tensor::kQ, request.q());
    ExpectEqual(call, Tensor::kK, request.k());
    ExpectEqual(call, Tensor::kV, request.v());
    EXPECT_EQ(call.call().message().size(), 0);  // given back
  }
}

TEST_F(LandingTest, LeavesNoTensorOnAnother) {
  StagingPool staging = *StagingPool::Create(1 << 20);
  Problem problem = SmallProblem(5, 3);
  AdmittedCall call = Admitted(problem);
  ASSERT_TRUE(TakePlaces(call, staging).ok());
  const StagedTensors& at = call.staged();
  EXPECT_EQ(at[Tensor::kV] - at[Tensor::kK], 5 * 3 * 8 * 4 + 32);  // rounded up to 64 bytes
  EXPECT_EQ(at[Tensor::kQ] - at[Tensor::kV], 5 * 3 * 8 * 4 + 32);
  EXPECT_EQ(at[Tensor::kLse], at.outputs.data());
  EXPECT_EQ(at.outputs.data() - at[Tensor::kQ], 5 * 3 * 8 * 4 + 32);
  EXPECT_EQ(at.workspace, nullptr);
}

TEST_F(LandingTest, PutsTheWorkspaceBetweenInputsAndOutputs) {
  GatedBackend engine;
  engine.SetWorkspace(100);
  Admission admission({}, engine, cost_, clock_);
  StagingPool staging = *StagingPool::Create(1 << 20);
  auto call = admission.Admit(DecodedCall(SmallProblem()), {.id = 1});
  ASSERT_TRUE(call.ok()) << call.status();
  ASSERT_TRUE(TakePlaces(*call, staging).ok());
  const StagedTensors& at = call->staged();
  EXPECT_EQ(at.workspace - at[Tensor::kQ], 1024);
  EXPECT_EQ(at.outputs.data() - at.workspace, 128);  // rounded up to 64 bytes
}

TEST_F(LandingTest, SaysFullNowWhenFreeMemoryLiesInPieces) {
  StagingPool staging = *StagingPool::Create(4224);
  StagingBlock first = *staging.TryAcquire(64);
  AdmittedCall call = Admitted(SmallProblem());  // needs 4224 bytes
  absl::Status status = TakePlaces(call, staging);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), reason::kMemoryPressure);
  EXPECT_TRUE(RetryAfterOf(status).has_value());
  first.Release();
  EXPECT_TRUE(TakePlaces(call, staging).ok());
  EXPECT_EQ(staging.used(), 4224);
}

}  // namespace
}  // namespace attnd
