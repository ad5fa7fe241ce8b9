// Captured attention maps of the CPU engine against the float64 reference, and their promises:
// forward's bits do not change, a call's own do not depend on threads.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "tests/conformance/capture_cases.h"

namespace attnd {
namespace {

std::unique_ptr<Backend> Cpu(int threads) {
  CpuBackendOptions options;
  options.threads = threads;
  return MakeCpuBackend(options);
}

TEST(Capture, AsTheReference) {
  const auto cpu = Cpu(2);
  for (ElementType element :
       {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    const std::vector<CaptureCase> cases = CaptureCases(element);
    EXPECT_EQ(CheckCaptures(*cpu, cases, 1e-6), cases.size());
  }
}

TEST(Capture, RandomProblemsAsTheReference) {
  const auto cpu = Cpu(1);
  CheckRandomCaptures(*cpu, ElementType::kFloat32, 80, 3000, 2e-4);
}

TEST(Capture, SameBitsForEveryNumberOfThreads) {
  const Problem p = DenseProblem(2, 3, 400, 600, ElementType::kFloat32);
  const auto one = Cpu(1), three = Cpu(3);
  const CaptureRequest request = {.block = 48, .keep_map = true};
  const CapturedMap a = CapturableForward(*one, p, 9).Capture(request);
  const CapturedMap b = CapturableForward(*three, p, 9).Capture(request);
  EXPECT_EQ(a.pooled, b.pooled);
  EXPECT_EQ(a.map, b.map);
  EXPECT_EQ(a.skewness, b.skewness);
}

TEST(Capture, RowsOfTheMapSumToOne) {
  const Problem p = DenseProblem(4, 2, 100, 300, ElementType::kFloat32);
  const auto cpu = Cpu(1);
  const CapturedMap map = CapturableForward(*cpu, p, 2).Capture({.block = 32, .keep_map = true});
  for (int64_t row = 0; row < p.q_len; ++row) {
    const auto begin = map.map.begin() + row * p.kv_len;
    EXPECT_NEAR(std::accumulate(begin, begin + p.kv_len, 0.0), 1.0, 2e-6);
  }
}

TEST(Capture, RefusesWhatItDoesNotCapture) {
  const auto code = [](const Problem& p, const CaptureRequest& request) {
    return CheckCapture(p, request).code();
  };
  const Problem p = DenseProblem(1, 1, 5000, 100, ElementType::kFloat32);
  EXPECT_EQ(code(p, {.block = 32}), absl::StatusCode::kOk);
  EXPECT_EQ(code(p, {.block = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(p, {.block = 65537}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(p, {.block = 32, .keep_map = true}), absl::StatusCode::kOutOfRange);
  const Problem large = DenseProblem(1, 1, 65536, 65536, ElementType::kFloat32);
  EXPECT_EQ(code(large, {.block = 64}), absl::StatusCode::kOk);
  EXPECT_EQ(code(large, {.block = 32}), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(DenseProblem(1, 1, 65537, 1, ElementType::kFloat32), {.block = 64}),
            absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace attnd
