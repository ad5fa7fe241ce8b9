#include "server/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/cost.h"
#include "base/status_macros.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

// Far above float32 rounding of sums of 64 terms near 1, far below any wrong answer.
constexpr float kTolerance = 1e-4f;

Problem MakeProblem(int64_t length, int64_t heads) {
  Problem p;
  p.batch = 1;
  p.q_heads = heads;
  p.kv_heads = heads / 2;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = 64;
  p.causal = true;
  return p;
}

// Numbers in (−1, 1) from a fixed sequence (Knuth's multiplicative hash).
std::vector<float> Fill(int64_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (int64_t n = 0; n < count; ++n) {
    uint32_t bits = (static_cast<uint32_t>(n) + seed) * 2654435761u;
    values[n] = static_cast<float>(bits >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

// All tensors of one problem, and a place for an engine's answers; outputs start as NaN.
class Trial {
 public:
  explicit Trial(const Problem& p)
      : problem_(p),
        q_(Fill(p.QueryElements(), 1)),
        k_(Fill(p.KeyElements(), 2)),
        v_(Fill(p.ValueElements(), 3)),
        d_o_(Fill(p.OutputElements(), 4)),
        o(p.OutputElements(), kNan),
        lse(p.LseElements(), kNan),
        d_q(p.QueryElements(), kNan),
        d_k(p.KeyElements(), kNan),
        d_v(p.ValueElements(), kNan) {}

  absl::Status Run(Backend& backend, CostModel* cost) {
    RETURN_IF_ERROR(Forward(backend, cost));
    return Backward(backend, cost);
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  // Workspace with the alignment that engines may expect.
  std::byte* Workspace(const Backend& backend, Direction direction) {
    workspace_.resize(backend.WorkspaceBytes(problem_, direction) + 64);
    auto address = reinterpret_cast<uintptr_t>(workspace_.data());
    return workspace_.data() + (64 - address % 64) % 64;
  }

  absl::Status Forward(Backend& backend, CostModel* cost) {
    ForwardCall call{.problem = &problem_,
                     .q = q_.data(),
                     .k = k_.data(),
                     .v = v_.data(),
                     .o = o.data(),
                     .lse = lse.data(),
                     .workspace = Workspace(backend, Direction::kForward),
                     .stop = {}};
    ASSIGN_OR_RETURN(LaunchReport report, backend.Forward(absl::MakeConstSpan(&call, 1)));
    Learn(Direction::kForward, report, cost);
    return absl::OkStatus();
  }

  absl::Status Backward(Backend& backend, CostModel* cost) {
    BackwardCall call{.problem = &problem_,
                      .q = q_.data(),
                      .k = k_.data(),
                      .v = v_.data(),
                      .o = o.data(),
                      .lse = lse.data(),
                      .d_o = d_o_.data(),
                      .d_q = d_q.data(),
                      .d_k = d_k.data(),
                      .d_v = d_v.data(),
                      .workspace = Workspace(backend, Direction::kBackward),
                      .stop = {}};
    ASSIGN_OR_RETURN(LaunchReport report, backend.Backward(absl::MakeConstSpan(&call, 1)));
    Learn(Direction::kBackward, report, cost);
    return absl::OkStatus();
  }

  void Learn(Direction direction, const LaunchReport& report, CostModel* cost) {
    if (cost == nullptr) return;
    cost->Learn(direction, problem_.element, Flops(problem_, direction),
                BytesOf(problem_, direction).input, report.seconds);
  }

  const Problem problem_;
  const std::vector<float> q_, k_, v_, d_o_;
  std::vector<std::byte> workspace_;

 public:
  std::vector<float> o, lse, d_q, d_k, d_v;
};

absl::Status Compare(absl::string_view name, const std::vector<float>& got,
                     const std::vector<float>& expected) {
  float worst = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    float error = std::fabs(got[n] - expected[n]);
    if (!(error <= kTolerance)) worst = std::isnan(error) ? error : std::max(worst, error);
    if (std::isnan(worst)) break;
  }
  if (worst == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("self test: ", name, " is wrong by ", worst, " (tolerance ", kTolerance, ")"));
}

absl::Status CompareWithReference(Backend& backend) {
  Problem problem = MakeProblem(48, 2);
  Trial got(problem), expected(problem);
  ReferenceBackend reference;
  RETURN_IF_ERROR(expected.Run(reference, nullptr));
  RETURN_IF_ERROR(got.Run(backend, nullptr));
  RETURN_IF_ERROR(Compare("o", got.o, expected.o));
  RETURN_IF_ERROR(Compare("lse", got.lse, expected.lse));
  RETURN_IF_ERROR(Compare("d_q", got.d_q, expected.d_q));
  RETURN_IF_ERROR(Compare("d_k", got.d_k, expected.d_k));
  return Compare("d_v", got.d_v, expected.d_v);
}

}  // namespace

absl::Status SelfTest(Backend& backend, CostModel& cost) {
  RETURN_IF_ERROR(CompareWithReference(backend));
  Trial timed(MakeProblem(192, 4));
  for (int n = 0; n < 3; ++n) RETURN_IF_ERROR(timed.Run(backend, &cost));
  return absl::OkStatus();
}

}  // namespace attnd
