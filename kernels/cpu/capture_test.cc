// Captured attention maps of the CPU engine against the float64 reference, and their promises:
// forward's bits do not change, a call's own do not depend on threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

// A forward that has run, with its tensors.
class ForwardRun {
 public:
  ForwardRun(Backend& backend, const Problem& problem, uint64_t seed)
      : backend_(backend), problem_(problem), in_(RandomInputs(problem, seed)) {
    o_ = Unwritten(problem_.OutputElements() * ElementBytes(problem_.element));
    lse_ = Unwritten(problem_.LseElements() * 4);
    call_.problem = &problem_;
    call_.q = in_.q.data(), call_.k = in_.k.data(), call_.v = in_.v.data();
    call_.mask_bits = in_.mask_bits.as<uint8_t>(), call_.bias = in_.bias.data();
    call_.o = o_.data(), call_.lse = lse_.as<float>();
    EXPECT_TRUE(backend_.Forward({&call_, 1}).ok());
  }

  CapturedMap Capture(const CaptureRequest& request) {
    auto captured = backend_.Capture(call_, request);
    EXPECT_TRUE(captured.ok()) << captured.status();
    return captured.ok() ? *std::move(captured) : CapturedMap{};
  }

 private:
  Backend& backend_;
  Problem problem_;
  ProblemInputs in_;
  AlignedBytes o_, lse_;
  ForwardCall call_;
};

std::unique_ptr<Backend> Cpu(int threads) {
  CpuBackendOptions options;
  options.threads = threads;
  return MakeCpuBackend(options);
}

Problem Dense(int64_t batch, int64_t heads, int64_t rows, int64_t keys, ElementType element) {
  Problem p;
  p.batch = batch;
  p.q_heads = p.kv_heads = heads;
  p.q_len = rows;
  p.kv_len = keys;
  p.qk_head_dim = p.v_head_dim = 32;
  p.element = element;
  return p;
}

// The largest |got − want| over want, entries below `floor` counted as it.
double RelativeError(const std::vector<float>& got, const std::vector<float>& want, double floor) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t n = 0; n < std::min(got.size(), want.size()); ++n) {
    worst = std::max(worst, std::abs(double{got[n]} - want[n]) / std::max<double>(want[n], floor));
  }
  return worst;
}

struct Case {
  std::string name;
  Problem problem;
  int64_t block;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  cases.push_back({"float32", Dense(3, 2, 300, 300, ElementType::kFloat32), 32});
  cases.push_back({"float16", Dense(2, 2, 256, 256, ElementType::kFloat16), 64});
  cases.push_back({"bfloat16", Dense(2, 2, 130, 270, ElementType::kBFloat16), 16});
  cases.push_back({"blocks over tiles", Dense(1, 1, 280, 530, ElementType::kFloat32), 96});
  cases.push_back({"one block", Dense(1, 1, 140, 260, ElementType::kFloat32), 300});
  Problem causal = Dense(2, 4, 257, 257, ElementType::kFloat32);
  causal.causal = true;
  causal.kv_heads = 2;
  cases.push_back({"causal, grouped heads", causal, 32});
  Problem padded = Dense(3, 2, 200, 300, ElementType::kFloat32);
  padded.kv_lengths = {300, 17, 0};
  cases.push_back({"lengths", padded, 32});
  Problem rest = Dense(2, 2, 160, 160, ElementType::kFloat32);
  rest.window_left = 10;
  rest.window_right = 0;
  rest.alignment = Alignment::kTopLeft;
  rest.denominator = DenominatorKind::kZeroRest;
  cases.push_back({"window, rest counted as 0", rest, 32});
  Problem dropped = Dense(2, 2, 160, 160, ElementType::kFloat32);
  dropped.dropout = {.threshold = 64, .seed = 7, .offset = 3};
  cases.push_back({"dropout", dropped, 32});
  return cases;
}

TEST(Capture, AsTheReference) {
  ReferenceBackend reference;
  const auto cpu = Cpu(2);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    ASSERT_EQ(Validate(c.problem), absl::OkStatus());
    const CaptureRequest request = {.block = c.block, .keep_map = true};
    const CapturedMap want = ForwardRun(reference, c.problem, 5).Capture(request);
    const CapturedMap got = ForwardRun(*cpu, c.problem, 5).Capture(request);
    EXPECT_LT(RelativeError(got.pooled, want.pooled, 1e-9), 1e-6);
    EXPECT_LT(RelativeError(got.map, want.map, want.mean * 1e-3), 1e-5);
    EXPECT_NEAR(got.mean, want.mean, 1e-6 * want.mean);
    EXPECT_NEAR(got.variance, want.variance, 1e-6 * want.variance);
    EXPECT_NEAR(got.skewness, want.skewness, 1e-6 * std::abs(want.skewness));
    EXPECT_EQ(PoolBlocks({c.problem.q_len, c.problem.kv_len, c.block}, got.map), got.pooled);
  }
}

TEST(Capture, RandomProblemsAsTheReference) {
  ReferenceBackend reference;
  const auto cpu = Cpu(1);
  int compared = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    const Problem p = RandomProblem(seed, {.max_pairs = 3000, .masks = seed % 2 == 0});
    const CaptureRequest request = {.block = 1 + static_cast<int64_t>(seed % 40)};
    if (IsPacked(p.layout)) {
      EXPECT_EQ(CheckCapture(p, request).code(), absl::StatusCode::kUnimplemented);
      continue;
    }
    ++compared;
    SCOPED_TRACE(seed);
    const CapturedMap want = ForwardRun(reference, p, seed).Capture(request);
    const CapturedMap got = ForwardRun(*cpu, p, seed).Capture(request);
    EXPECT_LT(RelativeError(got.pooled, want.pooled, 1e-3 * want.mean + 1e-30), 2e-4);
    EXPECT_NEAR(got.mean, want.mean, 1e-4 * want.mean);
  }
  EXPECT_GT(compared, 30);
}

TEST(Capture, SameBitsForEveryNumberOfThreads) {
  const Problem p = Dense(2, 3, 400, 600, ElementType::kFloat32);
  const auto one = Cpu(1), three = Cpu(3);
  const CaptureRequest request = {.block = 48, .keep_map = true};
  const CapturedMap a = ForwardRun(*one, p, 9).Capture(request);
  const CapturedMap b = ForwardRun(*three, p, 9).Capture(request);
  EXPECT_EQ(a.pooled, b.pooled);
  EXPECT_EQ(a.map, b.map);
  EXPECT_EQ(a.skewness, b.skewness);
}

TEST(Capture, RowsOfTheMapSumToOne) {
  const Problem p = Dense(4, 2, 100, 300, ElementType::kFloat32);
  const auto cpu = Cpu(1);
  const CapturedMap map = ForwardRun(*cpu, p, 2).Capture({.block = 32, .keep_map = true});
  for (int64_t row = 0; row < p.q_len; ++row) {
    const auto begin = map.map.begin() + row * p.kv_len;
    EXPECT_NEAR(std::accumulate(begin, begin + p.kv_len, 0.0), 1.0, 2e-6);
  }
}

TEST(Capture, RefusesWhatItDoesNotCapture) {
  const auto code = [](const Problem& p, const CaptureRequest& request) {
    return CheckCapture(p, request).code();
  };
  const Problem p = Dense(1, 1, 5000, 100, ElementType::kFloat32);
  EXPECT_EQ(code(p, {.block = 32}), absl::StatusCode::kOk);
  EXPECT_EQ(code(p, {.block = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(p, {.block = 65537}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(p, {.block = 32, .keep_map = true}), absl::StatusCode::kOutOfRange);
  const Problem large = Dense(1, 1, 65536, 65536, ElementType::kFloat32);
  EXPECT_EQ(code(large, {.block = 64}), absl::StatusCode::kOk);
  EXPECT_EQ(code(large, {.block = 32}), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(Dense(1, 1, 65537, 1, ElementType::kFloat32), {.block = 64}),
            absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace attnd
