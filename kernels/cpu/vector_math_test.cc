// Vector functions and products on every target of this processor: against the C library, the
// scalar dropout generator, and plain loops.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/vector_math_test.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/dropout.h"
#include "attention/element.h"
#include "attention/random_problem.h"
#include "kernels/cpu/gemm-inl.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

HWY_NOINLINE void ExpectExp2IsAccurate() {
  double worst = 0;
  for (float x = -126; x <= 1; x += 0.0007f) {
    worst = std::max(worst, std::abs(Exp2One(x) / std::exp2(double{x}) - 1));
  }
  EXPECT_LT(worst, 1.6 * 0x1p-24) << hwy::TargetName(HWY_TARGET);
  EXPECT_EQ(Exp2One(0), 1.0f);
  EXPECT_EQ(Exp2One(-127), 0.0f);
  EXPECT_EQ(Exp2One(-1e30f), 0.0f);
  EXPECT_EQ(Exp2One(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(Exp2One(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(Exp2One(FloatOf(0xffc12345))));
}

HWY_NOINLINE void ExpectDropoutBlockIsTheGenerators() {
  const DropoutStream stream = MakeDropoutStream(0x123456789abcdefu, 0xfedcba987654321u, 77);
  uint8_t bytes[16 * 40];
  DropoutBlock(stream, 3, 5, bytes, 40);
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t column = 0; column < 32; ++column) {
      ASSERT_EQ(bytes[row * 40 + column], DropoutByte(stream, 48 + row, 160 + column))
          << row << ", " << column << " " << hwy::TargetName(HWY_TARGET);
    }
  }
}

// Every 16-bit pattern to float and back, and floats at the middle between neighbours.
template <ElementType kElement>
void ExpectConversionsAreExact() {
  alignas(64) uint16_t from[kLanes], to[kLanes];
  const FloatTag d;
  for (int first = 0; first < 0x10000; first += kLanes) {
    for (int n = 0; n < kLanes; ++n) from[n] = static_cast<uint16_t>(first + n);
    alignas(64) float wide[kLanes];
    hn::Store(LoadVector<kElement>(from, 0), d, wide);
    for (int n = 0; n < kLanes; ++n) {
      const float expected = LoadElement(kElement, from, n);
      ASSERT_TRUE(wide[n] == expected || (wide[n] != wide[n] && expected != expected)) << from[n];
      // Moves off the representable numbers; ties included.
      wide[n] *= first % 3 == 0 ? 1.0f : first % 3 == 1 ? 1.00048828125f : 1.00390625f;
    }
    StoreVector<kElement>(hn::Load(d, wide), to, 0);
    for (int n = 0; n < kLanes; ++n) {
      uint16_t expected;
      StoreElement(kElement, &expected, 0, wide[n]);
      const float got = LoadElement(kElement, to, n);
      ASSERT_TRUE(to[n] == expected || (got != got && wide[n] != wide[n])) << wide[n];
    }
  }
}

HWY_NOINLINE void ExpectConversions() {
  ExpectConversionsAreExact<ElementType::kFloat16>();
  ExpectConversionsAreExact<ElementType::kBFloat16>();
}

// Matrices with small whole numbers: every sum is exact, so any order of it must agree.
struct Matrices {
  int rows, columns, depth;
  std::vector<float> a, b, c;
};

Matrices RandomMatrices(Random& random, int rows, int columns, int depth) {
  const int64_t padded = RoundUp(columns, kMaxPanelColumns);
  Matrices m{rows,
             columns,
             depth,
             std::vector<float>(rows * depth),
             std::vector<float>(depth * padded),
             std::vector<float>(rows * padded)};
  for (auto* matrix : {&m.a, &m.b, &m.c}) {
    for (float& x : *matrix) x = static_cast<float>(random.Between(-8, 8));
  }
  return m;
}

Product ProductOf(Matrices& m, bool accumulate) {
  const int64_t padded = RoundUp(m.columns, kMaxPanelColumns);
  return {.a = m.a.data(),
          .a_row = m.depth,
          .a_k = 1,
          .b = m.b.data(),
          .b_k = padded,
          .b_panel = kPanelColumns,
          .c = m.c.data(),
          .c_row = padded,
          .rows = m.rows,
          .columns = m.columns,
          .depth = m.depth,
          .accumulate = accumulate};
}

float Expected(const Product& p, const Matrices& before, int row, int column, const Span& depth) {
  float sum = p.accumulate ? before.c[row * p.c_row + column] : 0;
  for (int k = depth.begin; k < depth.end; ++k) {
    sum += before.a[row * p.a_row + k * p.a_k] * before.b[k * p.b_k + column];
  }
  return sum;
}

HWY_NOINLINE void ExpectProductsAreRight() {
  constexpr uint64_t kSeed = 11;
  Random random(kSeed);
  for (int repeat = 0; repeat < 60; ++repeat) {
    const int rows = static_cast<int>(random.Between(1, 20));
    const int columns = static_cast<int>(random.Between(1, 150));
    Matrices m = RandomMatrices(random, rows, columns, static_cast<int>(random.Between(1, 300)));
    const Matrices before = m;
    const Product product = ProductOf(m, random.Chance(0.5));
    random.Chance(0.5) ? Multiply(product) : MultiplyVisible(product);
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        ASSERT_EQ(m.c[row * product.c_row + column],
                  Expected(product, before, row, column, {0, m.depth}))
            << "seed " << kSeed << " repeat " << repeat << " " << hwy::TargetName(HWY_TARGET);
      }
    }
  }
}

HWY_NOINLINE void ExpectLimitsAreKept() {
  Random random(12);
  Matrices m = RandomMatrices(random, 2 * kTileRows, 3 * kPanelColumns, 90);
  const Matrices before = m;
  Product product = ProductOf(m, /*accumulate=*/false);
  const Span columns[] = {{0, kPanelColumns}, {kPanelColumns + 1, 3 * kPanelColumns}};
  const Span depths[] = {{10, 80}, {0, 0}};
  product.column_limits = columns;
  product.depth_limits = depths;
  Multiply(product);
  for (int row = 0; row < m.rows; ++row) {
    const int group = row / kTileRows;
    for (int column = 0; column < m.columns; ++column) {
      const int panel = column / kPanelColumns;
      const bool wanted = group == 0 ? panel == 0 : panel > 0;
      const float expected = wanted ? Expected(product, before, row, column, depths[group])
                                    : before.c[row * product.c_row + column];
      ASSERT_EQ(m.c[row * product.c_row + column], expected) << row << ", " << column;
    }
  }
}

// NaN in a row of B reaches the rows of C whose A shows it, and no others.
HWY_NOINLINE void ExpectHiddenTermsAreLeftOut() {
  Random random(13);
  Matrices m = RandomMatrices(random, 2, 5, 70);
  Product product = ProductOf(m, /*accumulate=*/true);
  for (int n = 0; n < 5; ++n) m.b[66 * product.b_k + n] = std::nanf("");
  m.a[0 * m.depth + 66] = kHiddenZero;
  m.a[1 * m.depth + 66] = 0;
  MultiplyVisible(product);
  for (int n = 0; n < 5; ++n) {
    EXPECT_FALSE(std::isnan(m.c[n])) << hwy::TargetName(HWY_TARGET);
    EXPECT_TRUE(std::isnan(m.c[product.c_row + n])) << hwy::TargetName(HWY_TARGET);
  }
}

HWY_NOINLINE void ExpectTransposeFillsPanels() {
  constexpr int kKeys = 101, kDim = 23, kStride = 29;
  std::vector<float> rows(kKeys * kStride);
  for (size_t n = 0; n < rows.size(); ++n) rows[n] = static_cast<float>(n);
  std::vector<float> panels(RoundUp(kKeys, kMaxPanelColumns) * kDim, -1.0f);
  TransposeToPanels(rows.data(), kStride, kKeys, kDim, panels.data());
  for (int key = 0; key < RoundUp(kKeys, kPanelColumns); ++key) {
    for (int n = 0; n < kDim; ++n) {
      const float* panel = panels.data() + key / kPanelColumns * kPanelColumns * kDim;
      ASSERT_EQ(panel[n * kPanelColumns + key % kPanelColumns],
                key < kKeys ? rows[key * kStride + n] : 0)
          << key << ", " << n << " " << hwy::TargetName(HWY_TARGET);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(ExpectExp2IsAccurate);
HWY_EXPORT(ExpectDropoutBlockIsTheGenerators);
HWY_EXPORT(ExpectConversions);
HWY_EXPORT(ExpectProductsAreRight);
HWY_EXPORT(ExpectLimitsAreKept);
HWY_EXPORT(ExpectHiddenTermsAreLeftOut);
HWY_EXPORT(ExpectTransposeFillsPanels);

// Runs a check on each target that is compiled and that this processor has.
template <class Check>
void OnEachTarget(const Check& check) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    check();
    hwy::SetSupportedTargetsForTest(0);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Exp2, IsWithinItsBoundAndKeepsNan) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectExp2IsAccurate)(); });
}

TEST(DropoutBlock, GivesTheGeneratorsBytes) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectDropoutBlockIsTheGenerators)(); });
}

TEST(Rows, ConvertEvery16BitNumberExactly) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectConversions)(); });
}

TEST(Multiply, AgreesWithPlainLoops) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectProductsAreRight)(); });
}

TEST(Multiply, KeepsToItsLimits) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectLimitsAreKept)(); });
}

TEST(MultiplyVisible, LeavesHiddenTermsOut) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectHiddenTermsAreLeftOut)(); });
}

TEST(TransposeToPanels, PlacesEveryNumberAndClearsTheRest) {
  OnEachTarget([] { HWY_DYNAMIC_DISPATCH(ExpectTransposeFillsPanels)(); });
}

}  // namespace
}  // namespace attnd
#endif
