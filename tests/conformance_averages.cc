#include "tests/conformance_averages.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "attention/tensor_view.h"
#include "tests/conformance_launch.h"

namespace attnd {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();

Problem BiasedProblem(ElementType element) {
  Problem p;
  p.batch = 1;
  p.q_heads = p.kv_heads = 2;
  p.q_len = 20;
  p.kv_len = 70;  // ragged, and more than one tile of some engines
  p.qk_head_dim = p.v_head_dim = 32;
  p.element = element;
  p.bias = Bias{ElementType::kFloat32, {1, 1, 20, 70}, false};
  return p;
}

ProblemInputs InputsWith(const Problem& p, float bias) {
  ProblemInputs inputs = RandomInputs(p, 1);
  for (int64_t n = 0; n < p.bias->shape.elements(); ++n) {
    StoreElement(p.bias->element, inputs.bias.data(), n, bias);
  }
  return inputs;
}

double AverageOfValues(const Problem& p, const ProblemInputs& inputs, int64_t head, int64_t d) {
  double sum = 0;
  for (int64_t j = 0; j < p.kv_len; ++j) {
    sum += LoadElement(p.element, inputs.v.data(), ValueStrides(p).Row(0, head, j) + d);
  }
  return sum / static_cast<double>(p.kv_len);
}

// `of` says what the row has in common. Every lse lies in [lowest, highest].
std::vector<std::string> Compare(const Problem& p, const ProblemInputs& inputs,
                                 const std::string& of, float highest, const ForwardResults& got) {
  const double tolerance = p.element == ElementType::kFloat32 ? 1e-5 : 0.01;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    for (int64_t d = 0; d < p.v_head_dim; ++d) {
      const double average = AverageOfValues(p, inputs, h, d);
      for (int64_t i = 0; i < p.q_len; ++i) {
        const double o = LoadElement(p.element, got.o.data(), OutputStrides(p).Row(0, h, i) + d);
        if (std::fabs(o - average) <= tolerance) continue;
        return {absl::StrCat(of, ": o[0, ", h, ", ", i, ", ", d, "] = ", o,
                             ", the average of V is ", average)};
      }
    }
  }
  for (int64_t n = 0; n < p.LseElements(); ++n) {
    const float lse = LoadElement(ElementType::kFloat32, got.lse.data(), n);
    if (lse <= highest && lse >= kLowest) continue;
    return {absl::StrCat(of, ": lse = ", lse)};
  }
  return {};
}

}  // namespace

std::vector<std::string> CompareWithAverages(Backend& backend, CallMemory& memory,
                                             ElementType element) {
  std::vector<std::string> failures;
  auto check = [&](const Problem& p, const ProblemInputs& inputs, const std::string& of,
                   float highest) {
    auto outcome = LaunchForward(backend, memory, {{&p, &inputs}});
    memory.Clear();
    if (!outcome.ok()) return failures.push_back(outcome.status().ToString());
    for (std::string& failure : Compare(p, inputs, of, highest, outcome->results[0])) {
      failures.push_back(std::move(failure));
    }
  };
  const Problem biased = BiasedProblem(element);
  for (float bias : {-1e20f, -1e30f, -2e38f, kLowest}) {
    check(biased, InputsWith(biased, bias), absl::StrCat("bias ", bias), bias / 2);
  }
  Problem capped = BiasedProblem(element);
  capped.softcap = 1e-40f;  // below the smallest normal number: 1/c is infinite
  ProblemInputs zeros = InputsWith(capped, 0);
  std::memset(zeros.q.data(), 0, static_cast<size_t>(zeros.q.size()));
  check(capped, zeros, "scores of 0 under a softcap of 1e-40", 5.0f);  // lse = ln 70
  return failures;
}

}  // namespace attnd
