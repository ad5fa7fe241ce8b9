// Callers' rows change on their way to a kernel and back as these tests say.
#include "kernels/cuda/layout/staging.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace attnd::cuda {
namespace {

TEST(PadRows, AddsZerosAndUnpadTakesThemAway) {
  for (Layout layout : {Layout::kBhld, Layout::kBlhd, Layout::kPackedThd, Layout::kPackedHtd}) {
    RowShape shape = {layout, 2, 3, 5, 13};
    std::vector<uint16_t> in(shape.rows() * 13), out(shape.padded_bytes() / 2, 0xffff), back(in);
    for (size_t n = 0; n < in.size(); ++n) in[n] = static_cast<uint16_t>(n + 1);
    PadRows(shape, in.data(), out.data());
    for (int64_t row = 0; row < shape.rows(); ++row) {
      for (int64_t d = 0; d < 16; ++d) {
        EXPECT_EQ(out[row * 16 + d], d < 13 ? in[row * 13 + d] : 0);
      }
    }
    UnpadRows(shape, out.data(), back.data());
    EXPECT_EQ(back, in);
  }
}

TEST(LargestExponent, LooksAtItsOwnRowsAndAtFiniteNumbersOnly) {
  RowShape shape = {Layout::kBlhd, 1, 2, 2, 2};
  std::vector<uint16_t> data;
  // Rows (0, head 0), (0, head 1), (1, head 0), (1, head 1).
  for (float value : {0.75f, -3.0f, 100.0f, 1.0f, HUGE_VALF, NAN, 0.0f, 0.0f}) {
    data.push_back(BFloat16FromFloat(value));
  }
  EXPECT_EQ(LargestExponent(shape, data.data(), {0, 0, 1, 0, 2}), 1);
  EXPECT_EQ(LargestExponent(shape, data.data(), {0, 1, 1, 0, 2}), 6);
  EXPECT_EQ(LargestExponent(shape, data.data(), {0, 0, 2, 1, 1}), kNoExponent);
}

TEST(BFloat16, SurvivesAsFloat16TimesAPowerOfTwo) {
  RowShape shape = {Layout::kBhld, 1, 1, 1, 8};
  for (int exponent : {-100, -40, -3, 0, 7, 60, 126}) {
    std::vector<float> values = {1.0f, -1.9921875f, 0x1p-10f, -0x1.fep-14f, 0.0f, -0.0f, 1.5f, -1};
    std::vector<uint16_t> in, half(8), back(8);
    for (float value : values) in.push_back(BFloat16FromFloat(std::ldexp(value, exponent)));
    EXPECT_EQ(LargestExponent(shape, in.data(), {0, 0, 1, 0, 1}), exponent);
    HalvesFromBFloat16(shape, in.data(), {0, 0, 1, 0, 1}, exponent, half.data());
    for (int n = 0; n < 8; ++n) {
      EXPECT_EQ(FloatFromFloat16(half[n]), values[n]) << exponent << " " << n;
    }
    BFloat16FromHalves(shape, half.data(), {0, 0, 1, 0, 1}, exponent, back.data());
    EXPECT_EQ(back, in) << exponent;
  }
}

// Rows of six numbers are two chunks, the last two columns zero.
TEST(Float32, IsTwoHalvesOfAPowerOfTwo) {
  RowShape shape = {Layout::kBhld, 1, 1, 1, 12};
  std::vector<float> in = {1.9999999f, -1.2345678f, 0x1.8p-30f, 0.0f, HUGE_VALF, NAN};
  for (int exponent : {-120, -3, 0, 90}) {
    std::vector<float> scaled;
    for (float value : in) scaled.push_back(std::ldexp(value, exponent));
    std::vector<uint16_t> halves(16, 0x7fff);
    EXPECT_EQ(LargestExponent(shape, scaled.data(), {0, 0, 1, 0, 1}), exponent);
    HalvesFromFloats(shape, scaled.data(), {0, 0, 1, 0, 1}, exponent - 14, halves.data());
    auto at = [&](int n, int part) {
      return FloatFromFloat16(halves[static_cast<size_t>(n / 4 * 8 + part * 4 + n % 4)]);
    };
    for (int n = 0; n < 4; ++n) {
      // Numbers below float32's normal ones have been rounded already.
      const float exact = std::ldexp(scaled[static_cast<size_t>(n)], -exponent);
      EXPECT_NEAR(std::ldexp(at(n, 0) + at(n, 1), -14), exact,
                  std::max(0x1p-22 * std::fabs(exact), 0x1p-39))
          << exponent << " " << n;
    }
    EXPECT_EQ(at(4, 0), HUGE_VALF);
    EXPECT_TRUE(std::isnan(at(5, 0)));
    for (int n = 4; n < 8; ++n) EXPECT_EQ(at(n, 1), 0) << n;
    for (int n = 6; n < 8; ++n) EXPECT_EQ(at(n, 0), 0) << n;
  }
}

TEST(BFloat16, KeepsInfinityAndNaN) {
  RowShape shape = {Layout::kBhld, 1, 1, 1, 8};
  std::vector<uint16_t> in(8, BFloat16FromFloat(HUGE_VALF)), half(8), back(8);
  in[3] = BFloat16FromFloat(NAN);
  HalvesFromBFloat16(shape, in.data(), {0, 0, 1, 0, 1}, 5, half.data());
  EXPECT_EQ(half[0], 0x7c00);
  BFloat16FromHalves(shape, half.data(), {0, 0, 1, 0, 1}, 5, back.data());
  EXPECT_EQ(back[0], in[0]);
  EXPECT_TRUE(std::isnan(FloatFromBFloat16(back[3])));
}

}  // namespace
}  // namespace attnd::cuda
