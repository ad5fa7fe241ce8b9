// Gradients are linear in what comes from above: d_o and d_lse times a power of two give the same
// bits of every gradient times that power, from gradients that vanish beside float16's smallest
// number to losses scaled by 65536.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/element.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd::cuda {
namespace {

struct Gradients {
  std::vector<float> d_q, d_k, d_v, d_sink;
};

std::vector<float> Floats(ElementType element, const Bytes& tensor) {
  std::vector<float> values(tensor.size() / ElementBytes(element));
  for (size_t n = 0; n < values.size(); ++n) {
    values[n] = static_cast<float>(LoadElement(element, tensor.data(), static_cast<int64_t>(n)));
  }
  return values;
}

class GradientScale {
 public:
  explicit GradientScale(const Problem& problem)
      : p_(problem),
        backend_(MakeEmulatedDevice({})),
        memory_(MakeHostCallMemory()),
        inputs_(RandomInputs(p_, 3)),
        d_lse_(inputs_.d_lse.as<float>(), inputs_.d_lse.as<float>() + p_.LseElements()),
        item_{.problem = &p_, .inputs = &inputs_} {
    auto forward = LaunchForward(backend_, *memory_, {item_});
    CHECK(forward.ok()) << forward.status();
    item_.o = std::move(forward->results[0].o);
    item_.lse = std::move(forward->results[0].lse);
  }

  Gradients Run(double factor) {
    ScaleUpstream(factor);
    auto backward = LaunchBackward(backend_, *memory_, {item_});
    CHECK(backward.ok()) << backward.status();
    const BackwardResults& results = backward->results[0];
    return {Floats(p_.element, results.d_q), Floats(p_.element, results.d_k),
            Floats(p_.element, results.d_v), Floats(ElementType::kFloat32, results.d_sink)};
  }

 private:
  // d_o of small integers, so that no power of two within float16's range costs it a bit.
  void ScaleUpstream(double factor) {
    Random random(5);
    for (int64_t n = 0; n < p_.OutputElements(); ++n) {
      const double value = static_cast<double>(random.Between(-7, 7)) * factor;
      StoreElement(p_.element, inputs_.d_o.data(), n, static_cast<float>(value));
    }
    for (size_t n = 0; n < d_lse_.size(); ++n) {
      inputs_.d_lse.as<float>()[n] = d_lse_[n] * static_cast<float>(factor);
    }
  }

  const Problem p_;
  CudaBackend backend_;
  std::unique_ptr<CallMemory> memory_;
  ProblemInputs inputs_;
  const std::vector<float> d_lse_;  // of factor 1
  LaunchItem item_;
};

void ExpectMultiple(const std::vector<float>& once, const std::vector<float>& scaled, double factor,
                    const char* name, ElementType element) {
  int64_t wrong = 0, finite = 0;
  for (size_t n = 0; n < once.size(); ++n) {
    const double expected = once[n] * factor;
    // A number that the output's type cannot hold says nothing.
    const bool half = element == ElementType::kFloat16;
    const double smaller = std::min(std::fabs(expected), std::fabs(double{once[n]}));
    if (half && (std::fabs(expected) > 65504 || smaller < 0x1p-14)) continue;
    ++finite;
    wrong += scaled[n] != static_cast<float>(expected);
  }
  EXPECT_EQ(wrong, 0) << name << " times " << factor << ", of " << finite;
  EXPECT_GT(finite, 0) << name << " times " << factor;
}

void ExpectLinear(const Problem& p, const std::vector<double>& factors) {
  GradientScale problem(p);
  const Gradients once = problem.Run(1);
  for (double factor : factors) {
    SCOPED_TRACE(absl::StrCat("head_dim ", p.qk_head_dim));
    const Gradients scaled = problem.Run(factor);
    ExpectMultiple(once.d_q, scaled.d_q, factor, "d_q", p.element);
    ExpectMultiple(once.d_k, scaled.d_k, factor, "d_k", p.element);
    ExpectMultiple(once.d_v, scaled.d_v, factor, "d_v", p.element);
    ExpectMultiple(once.d_sink, scaled.d_sink, factor, "d_sink", ElementType::kFloat32);
  }
}

Problem WithSink(int64_t head_dim, ElementType element) {
  Problem p;
  p.element = element;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = 70;
  p.kv_len = 75;
  p.qk_head_dim = p.v_head_dim = head_dim;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.denominator = DenominatorKind::kSink;
  p.sink_logits = {0.5f, -1.0f};
  p.dropout = {128, 1, 2};  // a factor of 2 for what is kept
  return p;
}

TEST(GradientScale, MovesOnlyTheExponentOfFloat16Gradients) {
  for (int64_t head_dim : {64, 128}) {
    ExpectLinear(WithSink(head_dim, ElementType::kFloat16), {0x1p8, 0x1p12, 0x1p-8});
  }
}

TEST(GradientScale, MovesOnlyTheExponentOfBFloat16Gradients) {
  ExpectLinear(WithSink(64, ElementType::kBFloat16), {0x1p20, 0x1p60, 0x1p-20, 0x1p-60});
}

}  // namespace
}  // namespace attnd::cuda
