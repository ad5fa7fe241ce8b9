// Gradients are linear in what comes from above: d_o and d_lse times a power of two give the same
// bits of every gradient times that power, from gradients that vanish beside float16's smallest
// number to losses scaled by 65536.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/element.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/emulated_device.h"

namespace attnd::cuda {
namespace {

struct Gradients {
  std::vector<float> d_q, d_k, d_v, d_sink;
};

std::vector<float> Floats(ElementType element, const AlignedBytes& tensor) {
  std::vector<float> values(tensor.size() / ElementBytes(element));
  for (size_t n = 0; n < values.size(); ++n) {
    values[n] = static_cast<float>(LoadElement(element, tensor.data(), static_cast<int64_t>(n)));
  }
  return values;
}

// Small integers, so that no power of two within float16's range costs d_o a bit.
AlignedBytes Upstream(const Problem& p, double factor) {
  Random random(5);
  AlignedBytes d_o(p.OutputElements() * 2);
  for (int64_t n = 0; n < p.OutputElements(); ++n) {
    const double value = static_cast<double>(random.Between(-7, 7)) * factor;
    StoreElement(p.element, d_o.data(), n, static_cast<float>(value));
  }
  return d_o;
}

class GradientScale {
 public:
  explicit GradientScale(const Problem& problem)
      : p_(problem),
        backend_(MakeEmulatedDevice({})),
        inputs_(RandomInputs(p_, 3)),
        o_(p_.OutputElements() * 2),
        lse_(p_.LseElements() * 4) {
    ForwardCall call;
    call.problem = &p_;
    call.q = inputs_.q.data();
    call.k = inputs_.k.data();
    call.v = inputs_.v.data();
    call.o = o_.data();
    call.lse = lse_.as<float>();
    AlignedBytes workspace(backend_.WorkspaceBytes(p_, Direction::kForward));
    call.workspace = workspace.data();
    EXPECT_TRUE(backend_.Forward({call}).ok());
  }

  Gradients Run(double factor) {
    AlignedBytes d_q(p_.QueryElements() * 2), d_k(p_.KeyElements() * 2),
        d_v(p_.ValueElements() * 2), d_sink(p_.batch * p_.q_heads * 4), d_o = Upstream(p_, factor);
    std::vector<float> d_lse(p_.LseElements());
    for (size_t n = 0; n < d_lse.size(); ++n) {
      d_lse[n] = inputs_.d_lse.as<float>()[n] * static_cast<float>(factor);
    }
    BackwardCall call;
    call.problem = &p_;
    call.q = inputs_.q.data();
    call.k = inputs_.k.data();
    call.v = inputs_.v.data();
    call.o = o_.data();
    call.lse = lse_.as<float>();
    call.d_o = d_o.data();
    call.d_lse = d_lse.data();
    call.d_q = d_q.data();
    call.d_k = d_k.data();
    call.d_v = d_v.data();
    call.d_sink = d_sink.as<float>();
    AlignedBytes workspace(backend_.WorkspaceBytes(p_, Direction::kBackward));
    call.workspace = workspace.data();
    EXPECT_TRUE(backend_.Backward({call}).ok());
    return {Floats(p_.element, d_q), Floats(p_.element, d_k), Floats(p_.element, d_v),
            Floats(ElementType::kFloat32, d_sink)};
  }

 private:
  const Problem p_;
  CudaBackend backend_;
  ProblemInputs inputs_;
  AlignedBytes o_, lse_;
};

void ExpectMultiple(const std::vector<float>& once, const std::vector<float>& scaled, double factor,
                    const char* name, ElementType element) {
  int64_t wrong = 0, finite = 0;
  for (size_t n = 0; n < once.size(); ++n) {
    const double expected = once[n] * factor;
    // What the output's type cannot hold says nothing.
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
