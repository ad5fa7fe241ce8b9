// The steps by numbers worked out by hand, and dropout's bits by the generator's published answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <tuple>

#include "attention/elementwise_dropout.h"
#include "modules/reference/gradient_sums.h"
#include "modules/reference/linear.h"
#include "modules/reference/norm.h"
#include "modules/reference/pointwise.h"
#include "modules/reference/rotary.h"

namespace attnd {
namespace {

const Rounder kExact(Rounding::kExact);
const Rounder kRounds(Rounding::kElements);

TEST(Linear, ReadsBothOrdersOfTheWeight) {
  const Numbers in = {1, 2}, bias = {0, 100, 0};
  EXPECT_EQ(LinearForward({1, 2, 3}, in, {1, 2, 3, 4, 5, 6}, &bias), (Numbers{5, 111, 17}));
  EXPECT_EQ(LinearForward({1, 2, 3, true}, in, {1, 3, 5, 2, 4, 6}, nullptr), (Numbers{5, 11, 17}));
}

TEST(Norm, GivesMeanZeroAndVarianceOne) {
  const Numbers x = {1, 2, 3, 6};
  const Numbers y = NormForward({.kind = NormKind::kLayer, .epsilon = 0}, 4, x, kExact);
  const double rstd = 1 / std::sqrt(3.5);
  for (int n = 0; n < 4; ++n) EXPECT_DOUBLE_EQ(y[n], (x[n] - 3) * rstd);
  const Numbers weight = {0, 1, 2, 3};
  const Numbers z =
      NormForward({.epsilon = 0.5, .weight_offset = 1, .weight = &weight}, 4, x, kExact);
  for (int n = 0; n < 4; ++n) EXPECT_DOUBLE_EQ(z[n], x[n] / std::sqrt(13.0) * (n + 1));
}

TEST(Norm, RoundsBeforeTheWeightWhereAsked) {
  const Numbers x = {1, 2}, weight = {3, 3};
  const Numbers y = NormForward({.round_before_weight = ElementType::kBFloat16, .weight = &weight},
                                2, x, kRounds);
  const double n = kRounds.To(ElementType::kBFloat16, 1 / std::sqrt(2.5));
  EXPECT_EQ(y[0], n * 3);
  EXPECT_NE(n, 1 / std::sqrt(2.5));
}

// Values of the formulas, from tables of erf and exp.
TEST(Activation, HasItsPublishedValues) {
  EXPECT_EQ(Activate(ActivationKind::kRelu, -2), 0);
  EXPECT_NEAR(Activate(ActivationKind::kGelu, 1), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(Activate(ActivationKind::kGelu, -10), -7.61985302416047e-23, 1e-35);
  EXPECT_NEAR(Activate(ActivationKind::kGeluTanh, 1), 0.8411919906082768, 1e-15);
  EXPECT_NEAR(Activate(ActivationKind::kSilu, 1), 0.7310585786300049, 1e-15);
  EXPECT_NEAR(Activate(ActivationKind::kQuickGelu, 1), 0.8457957659328212, 1e-14);
  EXPECT_NEAR(Activate(ActivationKind::kTanh, 1), 0.7615941559557649, 1e-15);
  EXPECT_EQ(Activate(ActivationKind::kSilu, -1e4), 0);
  for (int kind = 1; kind <= 6; ++kind) {
    EXPECT_TRUE(std::isnan(Activate(static_cast<ActivationKind>(kind), NAN))) << kind;
  }
}

TEST(Activation, ReluLetsThroughAsTorchDoes) {
  const ActivationKind relu = ActivationKind::kRelu;
  EXPECT_EQ(ActivationGradient(relu, -1, INFINITY), 0);
  EXPECT_EQ(ActivationGradient(relu, 0, NAN), 0);
  EXPECT_EQ(ActivationGradient(relu, NAN, 3), 3);
  EXPECT_EQ(ActivationGradient(relu, 2, -INFINITY), -INFINITY);
}

TEST(Rotary, TurnsHalvesAndPairs) {
  const Rotary halves{.inverse_frequency = {std::numbers::pi_v<float> / 2}};
  const Numbers turned = ApplyRotary(halves, Turn::kForward, {1}, 1, 3, {1, 2, 5}, kExact);
  EXPECT_NEAR(turned[0], -2, 1e-6);
  EXPECT_NEAR(turned[1], 1, 1e-6);
  EXPECT_EQ(turned[2], 5);  // beyond twice the frequencies
  const Rotary pairs{
      .inverse_frequency = {0.5f, 0.25f}, .attention_factor = 2, .interleaved = true};
  const Numbers z = ApplyRotary(pairs, Turn::kForward, {3}, 1, 4, {1, 0, 0, 1}, kExact);
  EXPECT_DOUBLE_EQ(z[0], 2 * std::cos(1.5));
  EXPECT_DOUBLE_EQ(z[1], 2 * std::sin(1.5));
  EXPECT_DOUBLE_EQ(z[2], -2 * std::sin(0.75));
  EXPECT_DOUBLE_EQ(z[3], 2 * std::cos(0.75));
  const Numbers back = ApplyRotary(pairs, Turn::kBackward, {3}, 1, 4, z, kExact);
  EXPECT_NEAR(back[0], 4, 1e-14);  // the factor twice
  EXPECT_NEAR(back[1], 0, 1e-14);
}

TEST(ElementwiseDropout, BitsAreTheGeneratorsOwn) {
  // Philox4x32-7 of counter (offset, row, column / 16, 2^31).
  for (const auto& [seed, offset, row, column] :
       {std::tuple{uint64_t{0}, uint64_t{0}, 0u, 0u},
        {42u, 7u, 1000u, 77u},
        {0x123456789abcdef0u, 0xfedcba9876543210u, 0xffffffffu, 65535u}}) {
    const PhiloxBlock block =
        Philox4x32x7({{static_cast<uint32_t>(offset), row, column / 16, 0x80000000u}},
                     static_cast<uint32_t>(seed),
                     static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
    const uint32_t byte = (block.word[column % 16 / 4] >> (column % 4 * 8)) & 255;
    EXPECT_EQ(ElementwiseDropoutByte(MakeDropoutStream(seed, offset, 9), row, column), byte);
  }
}

TEST(ElementwiseDropout, DropsItsShareAndScalesTheRest) {
  const Numbers ones(1000 * 64, 1);
  const Numbers out = ApplyDropout({.seed = 3, .offset = 5}, 64, 64, ones);
  int64_t dropped = 0;
  double sum = 0;
  for (double value : out) {
    dropped += value == 0;
    sum += value;
    if (value != 0) {
      EXPECT_EQ(value, 256.0 / 192);
    }
  }
  EXPECT_NEAR(static_cast<double>(dropped) / out.size(), 0.25, 0.01);
  EXPECT_NEAR(sum / out.size(), 1, 0.01);
  // Rows are logical, offsets and seeds are other streams.
  const Numbers later = ApplyDropout({.seed = 3, .offset = 5, .first_row = 10}, 64, 64, ones);
  EXPECT_TRUE(std::equal(later.begin(), later.end() - 640, out.begin() + 640));
  EXPECT_NE(ApplyDropout({.seed = 3, .offset = 6}, 64, 64, ones), out);
  EXPECT_NE(ApplyDropout({.seed = 4, .offset = 5}, 64, 64, ones), out);
}

TEST(ValueGradient, RoundsEachUseAndEachSum) {
  ValueGradient sum(1, 2, ElementType::kBFloat16);
  sum.Add({1 + 0x1p-9, -0.0}, kRounds);  // rounds to 1
  sum.Add({0x1p-9, 0}, kRounds);         // 1 + 2^-9 rounds to 1
  sum.Add({0x1p-7, 1}, kRounds);
  EXPECT_EQ(sum.values(), (Numbers{1 + 0x1p-7, 1}));
  ValueGradient part(2, 3, ElementType::kFloat32);
  part.Add(1, 2, {1, 2, 3, 4}, kRounds);
  EXPECT_EQ(part.values(), (Numbers{0, 1, 2, 0, 3, 4}));
}

TEST(AddRows, ABlockIsOneFloat32Addition) {
  const int64_t rows = 2 * kGradientRows;
  const auto add = [](int64_t, Numbers& sum) { sum[0] += 0x1p-26; };
  Numbers rounded = {1}, exact = {1};
  AddRows(rows, kRounds, rounded, add);
  AddRows(rows, kExact, exact, add);
  EXPECT_EQ(rounded[0], 1 + 0x1p-15);  // 1024 · 2^-26 twice, where each alone would be lost
  EXPECT_EQ(exact[0], 1 + 0x1p-15);
  Numbers cut = {1};
  for (int n = 0; n < 16; ++n) AddRows(1, kRounds, cut, add);
  EXPECT_EQ(cut[0], 1);
}

}  // namespace
}  // namespace attnd
