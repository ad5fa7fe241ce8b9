// Which kernels a problem gets, and what is said where there are none.
#include "kernels/cuda/selection.h"

#include <string>

#include "attention/random_problem.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd::cuda {
namespace {

using ::testing::HasSubstr;

Problem Plain(int64_t head_dim) {
  Problem p = PlainProblem(1, 1, 64, head_dim);
  p.element = ElementType::kFloat16;
  return p;
}

std::vector<KernelRow> Volta() { return KernelRowsOfGpu(70); }

std::string ForwardName(const Problem& p, int gpu = 70) {
  auto kernels = SelectForward(KernelRowsOfGpu(gpu), p);
  return kernels.ok() ? NameOf(kernels->forward) : std::string(kernels.status().message());
}
std::string BackwardName(const Problem& p, int gpu = 70) {
  auto kernels = SelectBackward(KernelRowsOfGpu(gpu), p);
  return kernels.ok() ? NameOf(kernels->backward) : std::string(kernels.status().message());
}

TEST(Selection, TakesTheNarrowestHeadDimensionThatHoldsBoth) {
  EXPECT_EQ(ForwardName(Plain(64)), "forward_d64_f32_linear");
  EXPECT_EQ(ForwardName(Plain(1)), "forward_d32_f32_linear");
  EXPECT_EQ(ForwardName(Plain(65)), "forward_d96_f32_linear");
  EXPECT_EQ(ForwardName(Plain(97)), "forward_d128_f32_linear");
  EXPECT_EQ(ForwardName(Plain(129)), "forward_d256_f32_linear");
  Problem mixed = Plain(16);
  mixed.v_head_dim = 100;
  EXPECT_EQ(BackwardName(mixed), "backward_d128_f32_linear");
}

TEST(Selection, NeedsGeneralScoresForAnythingButAPositiveScale) {
  auto general = [](auto change) {
    Problem p = Plain(64);
    change(p);
    return ForwardName(p) == "forward_d64_f32_general";
  };
  EXPECT_FALSE(general([](Problem& p) { p.causal = true; }));
  EXPECT_FALSE(general([](Problem& p) { p.window_left = 3; }));
  EXPECT_TRUE(general([](Problem& p) { p.scale = 0.0f; }));
  EXPECT_TRUE(general([](Problem& p) { p.scale = -1.0f; }));
  EXPECT_TRUE(general([](Problem& p) { p.scale = 1e-40f; }));
  EXPECT_TRUE(general([](Problem& p) { p.softcap = 5; }));
  EXPECT_TRUE(general([](Problem& p) { p.bias = Bias{}; }));
  EXPECT_TRUE(general([](Problem& p) { p.alibi_slopes = {1}; }));
}

TEST(Selection, ListsTilesUnderAMaskAndOnlyThere) {
  Problem p = Plain(64);
  p.bool_mask = BoolMask{};
  EXPECT_EQ(ForwardName(p), "forward_d64_f32_listed");
  EXPECT_EQ(BackwardName(p), "backward_d64_f32_listed");
  p.accumulate = AccumulateType::kFloat16;
  EXPECT_EQ(ForwardName(p), "forward_d64_f16_listed");
  p.allow_nondeterministic = true;  // not built
  EXPECT_EQ(BackwardName(p), "backward_d64_f32_listed");
  p.softcap = 5;
  EXPECT_EQ(BackwardName(p), "backward_d64_f32_general_atomic");
}

TEST(Selection, FollowsDropoutAccumulationAndOrder) {
  Problem p = Plain(64);
  p.dropout.threshold = 26;
  EXPECT_EQ(ForwardName(p), "forward_d64_f32_linear_dropout");
  EXPECT_EQ(BackwardName(p), "backward_d64_f32_linear_dropout");
  p.accumulate = AccumulateType::kFloat16;  // not built with dropout: float32, as the report says
  EXPECT_EQ(ForwardName(p), "forward_d64_f32_linear_dropout");
  p.dropout.threshold = 0;
  EXPECT_EQ(ForwardName(p), "forward_d64_f16_linear");
  p.allow_nondeterministic = true;
  EXPECT_EQ(BackwardName(p), "backward_d64_f32_linear_atomic");
  EXPECT_EQ(NameOf(SelectBackward(Volta(), p)->query_gradient), "query_gradient_d64_atomic");
  EXPECT_EQ(BackwardName(Plain(129)), "backward_d256_f32_linear");
}

TEST(Selection, TakesTheNewestArchitectureThatCan) {
  const auto architecture = [](const Problem& p, int gpu) {
    return SelectForward(KernelRowsOfGpu(gpu), p)->forward.architecture;
  };
  EXPECT_EQ(architecture(Plain(64), 75), Architecture::kSm70);
  EXPECT_EQ(architecture(Plain(64), 86), Architecture::kSm80);
  EXPECT_EQ(architecture(Plain(64), 90), Architecture::kSm90);
  EXPECT_EQ(architecture(Plain(200), 90), Architecture::kSm80);
  EXPECT_EQ(architecture(Plain(64), 100), Architecture::kSm80) << "sm_90a's run on no other GPU";
  EXPECT_EQ(ForwardName(Plain(32), 90), "forward_d64_f32_linear");
  const auto backward_architecture = [](const Problem& p) {
    return SelectBackward(KernelRowsOfGpu(90), p)->backward.architecture;
  };
  EXPECT_EQ(backward_architecture(Plain(32)), Architecture::kSm90);
  EXPECT_EQ(backward_architecture(Plain(200)), Architecture::kSm80);
  Problem capped = Plain(64);
  capped.softcap = 2;
  EXPECT_EQ(backward_architecture(capped), Architecture::kSm80) << "general scores";
  Problem dropped = Plain(64);
  dropped.dropout.threshold = 26;
  EXPECT_EQ(backward_architecture(dropped), Architecture::kSm90);
  dropped.allow_nondeterministic = true;
  EXPECT_EQ(backward_architecture(dropped), Architecture::kSm90);
  Problem sink = Plain(64);
  sink.denominator = DenominatorKind::kSink;
  EXPECT_EQ(backward_architecture(sink), Architecture::kSm80) << "all rows have second integers";
  EXPECT_EQ(ForwardName(Plain(32), 80), "forward_d32_f32_linear");
}

TEST(Selection, TakesBfloat16AsItIsWhereThereAreKernels) {
  Problem p = Plain(64);
  p.element = ElementType::kBFloat16;
  EXPECT_EQ(ForwardName(p), "forward_d64_f32_linear");
  for (const int gpu : {80, 90}) {
    EXPECT_EQ(ForwardName(p, gpu), "forward_bf16_d64_f32_linear");
    EXPECT_EQ(BackwardName(p, gpu),
              gpu == 80 ? "backward_bf16_d64_f32_linear" : "backward_bf16_d64_f32_linear_by_row");
  }
}

TEST(Selection, TakesFloat32AsItsArchitectureSplitsIt) {
  Problem p = Plain(40);
  p.element = ElementType::kFloat32;
  p.allow_nondeterministic = true;  // not built
  EXPECT_EQ(ForwardName(p), "forward_f16x3_d64_f32_linear");
  EXPECT_EQ(BackwardName(p), "backward_f16x3_d64_f32_linear");
  for (const int gpu : {80, 86, 90, 120}) {
    EXPECT_EQ(ForwardName(p, gpu), "forward_tf32x3_d64_f32_linear");
    EXPECT_EQ(BackwardName(p, gpu), "backward_tf32x3_d64_f32_linear");
  }
  p.qk_head_dim = 129;
  for (const int gpu : {70, 90}) {
    EXPECT_THAT(ForwardName(p, gpu), HasSubstr("head dimensions 129 and 40 of float32"));
  }
}

TEST(Selection, AddsTheGradientsThatAreWanted) {
  Problem p = Plain(64);
  EXPECT_FALSE(SelectBackward(Volta(), p)->sink_gradient.has_value());
  p.denominator = DenominatorKind::kSink;
  p.bias = Bias{};
  EXPECT_TRUE(SelectBackward(Volta(), p)->sink_gradient.has_value());
  EXPECT_FALSE(SelectBackward(Volta(), p)->bias_gradient.has_value());
  p.bias->want_gradient = true;
  EXPECT_TRUE(SelectBackward(Volta(), p)->bias_gradient.has_value());
}

TEST(Selection, SaysWhatWouldWorkInstead) {
  Problem p = Plain(64);
  p.element = ElementType::kFloat32;
  const absl::Status capture = SelectCapture(Volta(), p).status();
  EXPECT_EQ(capture.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(capture.message()), HasSubstr("no captured maps of float32"));
  EXPECT_THAT(std::string(capture.message()), HasSubstr("precision=\"f16\""));
  std::vector<KernelRow> none;
  auto missing = SelectForward(none, Plain(64));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("head dimensions 64 and 64"));
}

}  // namespace
}  // namespace attnd::cuda
