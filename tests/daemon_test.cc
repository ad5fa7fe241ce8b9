// The daemon end to end: a real server on a free port, a generated client.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/reference_backend.h"
#include "tests/daemon_fixture.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

TEST(Daemon, AnswersForwardAndBackwardByteForByteAsItsEngineWhenProblemsAreRandom) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  ReferenceBackend engine;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 10, .max_head_dim = 32});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    v1::ForwardRequest request = MakeForward(problem, seed);
    v1::ForwardResponse expected = ComputeForward(engine, problem, request), got;
    grpc::ClientContext context;
    grpc::Status status = daemon.stub().Forward(&context, request, &got);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(got.o(), expected.o());
    EXPECT_EQ(got.lse(), expected.lse());

    v1::BackwardRequest back = MakeBackward(problem, seed, got);
    v1::BackwardResponse expected_gradients = ComputeBackward(engine, problem, back), gradients;
    grpc::ClientContext back_context;
    status = daemon.stub().Backward(&back_context, back, &gradients);
    ASSERT_TRUE(status.ok()) << status.error_message();
    gradients.clear_receipt();
    EXPECT_EQ(gradients.SerializeAsString(), expected_gradients.SerializeAsString());
  }
}

}  // namespace
}  // namespace attnd
