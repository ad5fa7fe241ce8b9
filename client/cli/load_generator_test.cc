#include "client/cli/load_generator.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "attention/random_problem.h"
#include "client/cli/bench_report.h"
#include "tests/fixtures/fake_server.h"

namespace attnd {
namespace {

Problem SmallProblem() { return PlainProblem(1, 1, 4, 8); }

TEST(Percentile, IsTheNearestRank) {
  std::vector<double> values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(PercentileOf(values, 50), 5);
  EXPECT_EQ(PercentileOf(values, 90), 9);
  EXPECT_EQ(PercentileOf(values, 99), 10);
  EXPECT_EQ(PercentileOf(values, 0), 1);
  EXPECT_EQ(PercentileOf({}, 50), 0);
}

TEST(ArrivalSchedule, KeepsItsRate) {
  ArrivalSchedule even(100, false, 1);
  EXPECT_DOUBLE_EQ(even.Next(), 0.01);
  EXPECT_DOUBLE_EQ(even.Next(), 0.02);
  ArrivalSchedule poisson(100, true, 1);
  double last = 0, sum_of_squares = 0;
  for (int n = 0; n < 10000; ++n) {
    double at = poisson.Next();
    sum_of_squares += (at - last) * (at - last);
    last = at;
  }
  EXPECT_NEAR(last, 100, 5);                        // 10,000 calls at 100 a second
  EXPECT_NEAR(sum_of_squares / 10000, 2e-4, 2e-5);  // of exponential gaps: 2 / rate²
}

struct Bench {
  explicit Bench(FakeServer::Script script = nullptr) : server("127.0.0.1:0", std::move(script)) {
    client = *AttentionClient::Connect({.addresses = {server.address()}});
  }
  FakeServer server;
  std::unique_ptr<AttentionClient> client;
  Problem problem = SmallProblem();
};

TEST(LoadGenerator, CallsForwardAndBackwardFromEachCaller) {
  Bench bench;
  LoadGenerator generator(*bench.client, bench.problem);
  absl::StatusOr<LoadResult> result = generator.Run({.callers = 2,
                                                     .backward = true,
                                                     .warmup = absl::ZeroDuration(),
                                                     .duration = absl::Milliseconds(200)});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->forward.latencies.empty());
  EXPECT_FALSE(result->backward.latencies.empty());
  EXPECT_TRUE(std::is_sorted(result->forward.latencies.begin(), result->forward.latencies.end()));
  EXPECT_TRUE(result->forward.errors.empty());
  EXPECT_EQ(result->forward.last_receipt.bytes_sent, 3 * 4 * 8 * 4);
}

TEST(LoadGenerator, KeepsAnOpenLoopsRateAndCountsErrorsByCode) {
  Bench bench([](int call, grpc::ServerContext&) {
    return call % 2 == 0 ? grpc::Status::OK
                         : grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "quota");
  });
  LoadGenerator generator(*bench.client, bench.problem);
  Load load{.callers = 4,
            .requests_per_second = 100,
            .poisson = false,
            .warmup = absl::ZeroDuration(),
            .duration = absl::Milliseconds(500)};
  absl::StatusOr<LoadResult> result = generator.Run(load);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(bench.server.call_count(), 1 + 49);  // the first call and those due before 500 ms
  EXPECT_GT(result->forward.errors["RESOURCE_EXHAUSTED"], 0);
  BenchReport report(bench.problem, "", {});
  report.Add(load, *result, bench.problem);
  EXPECT_TRUE(report.has_errors());
  EXPECT_EQ(report.ToJson()["rows"][0]["arrivals"], "constant");
  EXPECT_GT(report.ToJson()["rows"][0]["calls"], 0);
  EXPECT_TRUE(absl::StrContains(report.ToCsv(), "forward,0,4,100,"));
}

TEST(LoadGenerator, FailsWithTheFirstCallsError) {
  Bench bench([](int, grpc::ServerContext&) {
    return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no");
  });
  LoadGenerator generator(*bench.client, bench.problem);
  EXPECT_EQ(generator.Run({}).status(), absl::UnimplementedError("no"));
}

}  // namespace
}  // namespace attnd
