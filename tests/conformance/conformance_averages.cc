#include "tests/conformance/conformance_averages.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "attention/tensor_view.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

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

// All rows have this in common: the first keys, up to `count`, are those that matter.
struct Rows {
  std::string name;
  float bias;             // of the first keys
  float others_bias = 0;  // of the others
  int64_t count = 70;
  float lowest_lse = 0, highest_lse = 0;
};

ProblemInputs InputsWith(const Problem& p, const Rows& rows) {
  ProblemInputs inputs = RandomInputs(p, 1);
  for (int64_t n = 0; n < p.bias->shape.elements(); ++n) {
    const bool counts = n % p.kv_len < rows.count;
    StoreElement(p.bias->element, inputs.bias.data(), n, counts ? rows.bias : rows.others_bias);
  }
  return inputs;
}

double AverageOfValues(const Problem& p, const ProblemInputs& inputs, int64_t count, int64_t head,
                       int64_t d) {
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) {
    sum += LoadElement(p.element, inputs.v.data(), ValueStrides(p).Row(0, head, j) + d);
  }
  return sum / static_cast<double>(count);
}

std::vector<std::string> Compare(const Problem& p, const ProblemInputs& inputs, const Rows& rows,
                                 const ForwardResults& got) {
  const double tolerance = p.element == ElementType::kFloat32 ? 1e-5 : 0.01;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    for (int64_t d = 0; d < p.v_head_dim; ++d) {
      const double average = AverageOfValues(p, inputs, rows.count, h, d);
      for (int64_t i = 0; i < p.q_len; ++i) {
        const double o = LoadElement(p.element, got.o.data(), OutputStrides(p).Row(0, h, i) + d);
        if (std::fabs(o - average) <= tolerance) continue;
        return {absl::StrCat(rows.name, ": o[0, ", h, ", ", i, ", ", d, "] = ", o,
                             ", the average of V is ", average)};
      }
    }
  }
  for (int64_t n = 0; n < p.LseElements(); ++n) {
    const float lse = LoadElement(ElementType::kFloat32, got.lse.data(), n);
    if (lse <= rows.highest_lse && lse >= rows.lowest_lse) continue;
    return {absl::StrCat(rows.name, ": lse = ", lse)};
  }
  return {};
}

}  // namespace

std::vector<std::string> CompareWithAverages(Backend& backend, CallMemory& memory,
                                             ElementType element) {
  std::vector<std::string> failures;
  auto check = [&](const Problem& p, const ProblemInputs& inputs, const Rows& rows) {
    auto outcome = LaunchForward(backend, memory, {{&p, &inputs}});
    memory.Clear();
    if (!outcome.ok()) return failures.push_back(outcome.status().ToString());
    for (std::string& failure : Compare(p, inputs, rows, outcome->results[0])) {
      failures.push_back(std::move(failure));
    }
  };
  const Problem biased = BiasedProblem(element);
  auto check_biased = [&](const Rows& rows) { check(biased, InputsWith(biased, rows), rows); };
  for (float size : {1e20f, 1e30f, 2e38f, kLargest}) {
    check_biased({.name = absl::StrCat("bias ", -size),
                  .bias = -size,
                  .lowest_lse = -kLargest,
                  .highest_lse = -size / 2});
    check_biased({.name = absl::StrCat("bias ", size),
                  .bias = size,
                  .lowest_lse = size / 2,
                  .highest_lse = kLargest});
  }
  check_biased({.name = "biases -1e20 and -1e30",
                .bias = -1e20f,
                .others_bias = -1e30f,
                .count = 33,
                .lowest_lse = -1e20f,
                .highest_lse = -5e19f});
  Problem capped = BiasedProblem(element);
  capped.softcap = 1e-40f;  // below the smallest normal number: 1/c is infinite
  const Rows of_zeros = {
      .name = "scores of 0 under a softcap of 1e-40", .bias = 0, .highest_lse = 5};  // ln 70
  ProblemInputs zeros = InputsWith(capped, of_zeros);
  std::memset(zeros.q.data(), 0, static_cast<size_t>(zeros.q.size()));
  check(capped, zeros, of_zeros);
  return failures;
}

}  // namespace attnd
