#include "tests/conformance/capture_cases.h"

#include "attention/problem_text.h"
#include "kernels/reference_backend.h"

namespace attnd {

int CheckCaptures(Backend& backend, const std::vector<CaptureCase>& cases, double error) {
  ReferenceBackend reference;
  int compared = 0;
  for (const CaptureCase& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(Validate(c.problem), absl::OkStatus());
    if (!backend.Supports(c.problem, Direction::kForward).ok()) continue;
    ++compared;
    const CaptureRequest request = {.block = c.block, .keep_map = true};
    const CapturedMap want = CapturableForward(reference, c.problem, 5).Capture(request);
    const CapturedMap got = CapturableForward(backend, c.problem, 5).Capture(request);
    EXPECT_LT(RelativeError(got.pooled, want.pooled, 1e-9), error);
    EXPECT_LT(RelativeError(got.map, want.map, want.mean * 1e-3), 10 * error);
    EXPECT_NEAR(got.mean, want.mean, error * want.mean);
    EXPECT_NEAR(got.variance, want.variance, error * want.variance);
    EXPECT_NEAR(got.skewness, want.skewness, error * std::abs(want.skewness));
    EXPECT_EQ(PoolBlocks({c.problem.q_len, c.problem.kv_len, c.block}, got.map), got.pooled);
  }
  return compared;
}

void CheckRandomCaptures(Backend& backend, ElementType element, uint64_t seeds, int64_t max_pairs,
                         double error) {
  ReferenceBackend reference;
  uint64_t compared = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = max_pairs, .masks = seed % 2 == 0});
    p.element = element;
    if (p.bias) p.bias->element = element;
    const CaptureRequest request = {.block = 1 + static_cast<int64_t>(seed % 40)};
    if (IsPacked(p.layout)) {
      EXPECT_EQ(CheckCapture(p, request).code(), absl::StatusCode::kUnimplemented);
      continue;
    }
    if (!backend.Supports(p, Direction::kForward).ok()) continue;
    ++compared;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(p));
    const CapturedMap want = CapturableForward(reference, p, seed).Capture(request);
    const CapturedMap got = CapturableForward(backend, p, seed).Capture(request);
    EXPECT_LT(RelativeError(got.pooled, want.pooled, 1e-3 * want.mean + 1e-30), error);
    EXPECT_NEAR(got.mean, want.mean, error * want.mean + 1e-14);
  }
  EXPECT_GT(compared, seeds / 4);
}

}  // namespace attnd
