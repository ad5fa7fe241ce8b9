#include "server/app/startup_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/cost.h"
#include "base/status_macros.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

// Far above the rounding of sums of 64 terms near 1 in that element, far below a wrong answer.
float Tolerance(ElementType element) {
  if (element == ElementType::kFloat32) return 1e-4f;
  return element == ElementType::kFloat16 ? 2e-2f : 1e-1f;
}

Problem MakeProblem(ElementType element, int64_t length, int64_t heads) {
  Problem p;
  p.batch = 1;
  p.q_heads = heads;
  p.kv_heads = heads / 2;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = 64;
  p.element = element;
  p.causal = true;
  return p;
}

// 64-byte aligned memory, as engines expect it, filled with NaN.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes) / kLine + 1) {
    std::memset(bytes_.data(), 0xff, bytes_.size() * kLine);
  }
  std::byte* data() { return bytes_.front().bytes; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }

 private:
  static constexpr size_t kLine = 64;
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::vector<Line> bytes_;
};

// A tensor and its type: numbers in (−1, 1) from a fixed sequence (Knuth's multiplicative hash), or
// NaN to be overwritten.
class Numbers {
 public:
  Numbers(ElementType element, int64_t count)
      : element_(element), count_(count), memory_(count * ElementBytes(element)) {}
  Numbers(ElementType element, int64_t count, uint32_t seed) : Numbers(element, count) {
    for (int64_t n = 0; n < count; ++n) {
      uint32_t bits = (static_cast<uint32_t>(n) + seed) * 2654435761u;
      StoreElement(element, data(), n, static_cast<float>(bits >> 8) / 8388608.0f - 1.0f);
    }
  }
  std::byte* data() { return memory_.data(); }
  float* floats() { return memory_.as<float>(); }
  int64_t count() const { return count_; }
  float At(int64_t n) { return LoadElement(element_, data(), n); }
  ElementType element() const { return element_; }

 private:
  ElementType element_;
  int64_t count_;
  Memory memory_;
};

// All tensors of one problem. Backward is given `forward`'s o and lse.
struct Trial {
  explicit Trial(const Problem& p)
      : problem(p),
        q(p.element, p.QueryElements(), 1),
        k(p.element, p.KeyElements(), 2),
        v(p.element, p.ValueElements(), 3),
        d_o(p.element, p.OutputElements(), 4),
        o(p.element, p.OutputElements()),
        lse(ElementType::kFloat32, p.LseElements()),
        d_q(p.element, p.QueryElements()),
        d_k(p.element, p.KeyElements()),
        d_v(p.element, p.ValueElements()) {}

  absl::Status Forward(Backend& backend, CostModel* cost) {
    Memory workspace(backend.WorkspaceBytes(problem, Direction::kForward));
    ForwardCall call{.problem = &problem,
                     .q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .o = o.data(),
                     .lse = lse.floats(),
                     .workspace = workspace.data(),
                     .stop = {}};
    ASSIGN_OR_RETURN(LaunchReport report, backend.Forward(absl::MakeConstSpan(&call, 1)));
    Learn(Direction::kForward, report, cost);
    return absl::OkStatus();
  }

  absl::Status Backward(Backend& backend, Trial& forward, CostModel* cost) {
    Memory workspace(backend.WorkspaceBytes(problem, Direction::kBackward));
    BackwardCall call{.problem = &problem,
                      .q = q.data(),
                      .k = k.data(),
                      .v = v.data(),
                      .o = forward.o.data(),
                      .lse = forward.lse.floats(),
                      .d_o = d_o.data(),
                      .d_q = d_q.data(),
                      .d_k = d_k.data(),
                      .d_v = d_v.data(),
                      .workspace = workspace.data(),
                      .stop = {}};
    ASSIGN_OR_RETURN(LaunchReport report, backend.Backward(absl::MakeConstSpan(&call, 1)));
    Learn(Direction::kBackward, report, cost);
    return absl::OkStatus();
  }

  void Learn(Direction direction, const LaunchReport& report, CostModel* cost) {
    if (cost == nullptr) return;
    cost->Learn(problem, direction, Flops(problem, direction), BytesOf(problem, direction).input,
                report.seconds);
  }

  const Problem problem;
  Numbers q, k, v, d_o, o, lse, d_q, d_k, d_v;
};

absl::Status Compare(absl::string_view name, Numbers& got, Numbers& expected, float tolerance) {
  for (int64_t n = 0; n < got.count(); ++n) {
    float error = std::fabs(got.At(n) - expected.At(n));
    if (error <= tolerance * std::max(1.0f, std::fabs(expected.At(n)))) continue;  // not for NaN
    return absl::InternalError(absl::StrCat("self test: ", name, " is wrong: element ", n, " is ",
                                            got.At(n), ", expected ", expected.At(n)));
  }
  return absl::OkStatus();
}

absl::Status CompareWithReference(Backend& backend, ElementType element) {
  Trial got(MakeProblem(element, 48, 2)), expected(got.problem);
  ReferenceBackend reference;
  float tolerance = Tolerance(element);
  RETURN_IF_ERROR(expected.Forward(reference, nullptr));
  RETURN_IF_ERROR(got.Forward(backend, nullptr));
  RETURN_IF_ERROR(Compare("o", got.o, expected.o, tolerance));
  RETURN_IF_ERROR(Compare("lse", got.lse, expected.lse, tolerance));
  RETURN_IF_ERROR(expected.Backward(reference, expected, nullptr));
  RETURN_IF_ERROR(got.Backward(backend, expected, nullptr));
  RETURN_IF_ERROR(Compare("d_q", got.d_q, expected.d_q, tolerance));
  RETURN_IF_ERROR(Compare("d_k", got.d_k, expected.d_k, tolerance));
  return Compare("d_v", got.d_v, expected.d_v, tolerance);
}

bool Supports(const Backend& backend, ElementType element) {
  Problem problem = MakeProblem(element, 48, 2);
  return backend.Supports(problem, Direction::kForward).ok() &&
         backend.Supports(problem, Direction::kBackward).ok();
}

// Long enough for the cost model to learn from: a faster engine is given more to do.
int64_t TimedLength(const Backend& backend, ElementType element) {
  constexpr double kSeconds = 400e-6;
  constexpr int64_t kLongest = 768;
  int64_t length = 192;
  while (length < kLongest && Flops(MakeProblem(element, length, 4), Direction::kForward) <
                                  kSeconds * backend.info().flops_per_second) {
    length *= 2;
  }
  return length;
}

absl::Status TimeLargerOnes(Backend& backend, ElementType element, CostModel& cost) {
  Trial timed(MakeProblem(element, TimedLength(backend, element), 4));
  for (int n = 0; n < 3; ++n) {
    RETURN_IF_ERROR(timed.Forward(backend, &cost));
    RETURN_IF_ERROR(timed.Backward(backend, timed, &cost));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status StartupCheck(Backend& backend, CostModel& cost) {
  bool any = false;
  for (ElementType element :
       {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    if (!Supports(backend, element)) continue;
    any = true;
    RETURN_IF_ERROR(CompareWithReference(backend, element));
    RETURN_IF_ERROR(TimeLargerOnes(backend, element, cost));
  }
  if (any) return absl::OkStatus();
  return absl::InternalError("self test: the engine supports no element type");
}

}  // namespace attnd
