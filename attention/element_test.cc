#include "attention/element.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace attnd {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

// A half's value from its definition: sign, five bits of exponent, ten of fraction.
double HalfValue(uint16_t half) {
  int exponent = (half >> 10) & 31;
  double fraction = half & 0x3ff;
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

bool IsHalfFinite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

TEST(Float16, HasTheValueOfItsDefinitionForAllBitPatterns) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    uint16_t half = static_cast<uint16_t>(bits);
    float value = FloatFromFloat16(half);
    if (IsHalfFinite(half)) {
      ASSERT_EQ(value, HalfValue(half)) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), bits >= 0x8000) << std::hex << bits;
    } else if ((half & 0x3ff) == 0) {
      ASSERT_EQ(value, half & 0x8000 ? -kFloatInfinity : kFloatInfinity);
    } else {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    }
  }
}

TEST(Float16, SurvivesTheRoundTripForAllBitPatterns) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    uint16_t half = static_cast<uint16_t>(bits);
    uint16_t back = Float16FromFloat(FloatFromFloat16(half));
    if (std::isnan(FloatFromFloat16(half))) {
      ASSERT_TRUE(std::isnan(FloatFromFloat16(back)));
    } else {
      ASSERT_EQ(back, half) << std::hex << bits;
    }
  }
}

// Between neighbours lo and hi the middle goes to the even one, and a step aside decides.
void ExpectNearestEven(uint16_t lo, uint16_t hi, float middle, uint16_t (*convert)(float)) {
  ASSERT_EQ(convert(middle), lo & 1 ? hi : lo) << std::hex << lo;
  ASSERT_EQ(convert(std::nextafter(middle, 0.0f)), lo) << std::hex << lo;
  ASSERT_EQ(convert(std::nextafter(middle, kFloatInfinity)), hi) << std::hex << lo;
  ASSERT_EQ(convert(-middle), (lo & 1 ? hi : lo) | 0x8000) << std::hex << lo;
}

TEST(Float16, RoundsToNearestEvenBetweenAllNeighbours) {
  for (uint16_t lo = 0; lo < 0x7bff; ++lo) {
    uint16_t hi = lo + 1;
    ExpectNearestEven(lo, hi, static_cast<float>((HalfValue(lo) + HalfValue(hi)) / 2),
                      Float16FromFloat);
  }
  ExpectNearestEven(0x7bff, 0x7c00, 65520, Float16FromFloat);  // the largest, and infinity
}

TEST(Float16, BecomesInfinityOnOverflowAndKeepsNan) {
  EXPECT_EQ(Float16FromFloat(1e30f), 0x7c00);
  EXPECT_EQ(Float16FromFloat(-kFloatInfinity), 0xfc00);
  EXPECT_TRUE(std::isnan(FloatFromFloat16(Float16FromFloat(std::nanf("")))));
  EXPECT_TRUE(std::isnan(FloatFromFloat16(Float16FromFloat(FloatOf(0x7f800001)))));
  EXPECT_EQ(Float16FromFloat(1e-30f), 0);
  EXPECT_EQ(Float16FromFloat(-1e-30f), 0x8000);
}

#ifdef __FLT16_MAX__
TEST(Float16, AgreesWithTheCompilersOwnType) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 997) {
    float value = FloatOf(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    _Float16 theirs = static_cast<_Float16>(value);
    uint16_t expected;
    std::memcpy(&expected, &theirs, sizeof(expected));
    ASSERT_EQ(Float16FromFloat(value), expected) << std::hex << bits;
  }
}
#endif

TEST(BFloat16, IsTheUpperHalfOfAFloatForAllBitPatterns) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    uint16_t stored = static_cast<uint16_t>(bits);
    float value = FloatFromBFloat16(stored);
    ASSERT_EQ(BitsOf(value), bits << 16);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(FloatFromBFloat16(BFloat16FromFloat(value))));
    } else {
      ASSERT_EQ(BFloat16FromFloat(value), stored);
    }
  }
}

TEST(BFloat16, RoundsToNearestEvenBetweenAllNeighbours) {
  for (uint16_t lo = 0; lo < 0x7f7f; ++lo) {
    uint16_t hi = lo + 1;
    ExpectNearestEven(lo, hi, FloatOf((uint32_t{lo} << 16) + 0x8000), BFloat16FromFloat);
  }
  EXPECT_EQ(BFloat16FromFloat(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(FloatFromBFloat16(BFloat16FromFloat(FloatOf(0x7f800001)))));
}

TEST(Element, LoadsAndStoresEachType) {
  for (ElementType type : {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32}) {
    alignas(4) char data[12] = {};
    StoreElement(type, data, 2, -1.5f);
    EXPECT_EQ(LoadElement(type, data, 2), -1.5f) << ElementName(type);
    EXPECT_EQ(LoadElement(type, data, 1), 0);
  }
}

}  // namespace
}  // namespace attnd
