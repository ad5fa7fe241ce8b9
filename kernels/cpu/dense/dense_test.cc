// Dense products, norms and pointwise functions against float64, on every vector target that this
// processor has, and what may not change a bit.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "attention/random_problem.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/dense/dense_product.h"
#include "kernels/cpu/dense/norm.h"
#include "kernels/cpu/dense/pointwise.h"
#include "modules/reference/norm.h"
#include "modules/reference/pointwise.h"

namespace attnd {
namespace {

constexpr ElementType kElements[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                     ElementType::kFloat16};
constexpr double kFloatUnit = 0x1p-24;

double UnitOf(ElementType element) {
  return element == ElementType::kFloat32    ? kFloatUnit
         : element == ElementType::kBFloat16 ? 0x1p-8
                                             : 0x1p-11;
}

class DenseTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { Choose(GetParam()); }
  void TearDown() override { Choose(0); }
  static void Choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// A tensor, and its numbers as they are stored. Memory is exactly as large as the tensor.
struct Stored {
  Stored(Random& random, ElementType of, int64_t count, double scale = 1)
      : element(of), bytes(count * ElementBytes(of)), numbers(count) {
    for (int64_t n = 0; n < count; ++n) {
      StoreElement(of, bytes.data(), n, static_cast<float>(scale * random.Normal()));
      numbers[n] = LoadElement(of, bytes.data(), n);
    }
  }
  Tensor tensor() { return {bytes.data(), element}; }
  void Set(int64_t index, float number) {
    StoreElement(element, bytes.data(), index, number);
    numbers[index] = LoadElement(element, bytes.data(), index);
  }
  Numbers Read() const {
    Numbers read(numbers.size());
    for (size_t n = 0; n < read.size(); ++n) read[n] = LoadElement(element, bytes.data(), n);
    return read;
  }
  ElementType element;
  std::vector<uint8_t> bytes;
  Numbers numbers;
};

// ---- Products.

struct ProductCase {
  int64_t rows, columns, depth;
};
constexpr ProductCase kProducts[] = {{1, 1, 1},     {5, 64, 128},   {7, 65, 129},
                                     {50, 100, 37}, {390, 258, 66}, {3, 31, 1030}};
struct Orders {
  DenseOrder a, b;
};
constexpr Orders kOrders[] = {{DenseOrder::kRows, DenseOrder::kPanels},
                              {DenseOrder::kRows, DenseOrder::kDepth},
                              {DenseOrder::kDepth, DenseOrder::kDepth},
                              {DenseOrder::kDepth, DenseOrder::kPanels}};

void RunProduct(const DenseProduct& product) {
  std::vector<float> scratch(kDenseScratchFloats, NAN);
  for (int64_t item = 0; item < DenseItems(product); ++item) {
    RunDenseItem(product, item, scratch.data());
  }
}

// A, B and C of a case; B is [columns, depth] where it is packed, else [depth, columns].
class ProductUnderTest {
 public:
  ProductUnderTest(const ProductCase& sizes, const Orders& orders, ElementType element)
      : random_(sizes.rows),
        sizes_(sizes),
        orders_(orders),
        a_(random_, element, sizes.rows * sizes.depth),
        b_(random_, element, sizes.columns * sizes.depth),
        panels_(PackedElements(sizes.columns, sizes.depth) * ElementBytes(element), 0xff),
        c(random_, element, sizes.rows * sizes.columns) {
    product = {.rows = sizes.rows,
               .columns = sizes.columns,
               .depth = sizes.depth,
               .operand = element,
               .a = {a_.bytes.data(), element, AStride()},
               .a_order = orders.a,
               .b = {b_.bytes.data(), element, sizes.columns},
               .b_order = orders.b,
               .c = c.bytes.data(),
               .c_element = element};
    Pack();
  }

  // For the product's operand.
  void Pack() {
    if (orders_.b != DenseOrder::kPanels) return;
    const PanelSource source{
        {b_.bytes.data(), b_.element, sizes_.depth}, sizes_.columns, sizes_.depth};
    for (int64_t panel = 0; panel < DensePanels(sizes_.columns); ++panel) {
      PackPanel(source, panel, product.operand, panels_.data());
    }
    product.b = {panels_.data(), product.operand, 0};
  }

  double A(int64_t m, int64_t k) const { return a_.numbers[AIndex(m, k)]; }
  double B(int64_t k, int64_t n) const { return b_.numbers[BIndex(k, n)]; }
  void SetA(int64_t m, int64_t k, float number) { a_.Set(AIndex(m, k), number); }
  void SetB(int64_t k, int64_t n, float number) {
    b_.Set(BIndex(k, n), number);
    Pack();
  }
  // Returns |sum − what is there| over the error that float32 sums and one rounding of the result
  // leave.
  double ErrorRatio() const { return ErrorRatioOf(c.Read()); }
  double ErrorRatioOf(const Numbers& read) const {
    double most = 0;
    for (int64_t m = 0; m < sizes_.rows; ++m) {
      for (int64_t n = 0; n < sizes_.columns; ++n) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < sizes_.depth; ++k) {
          sum += A(m, k) * B(k, n);
          size += std::fabs(A(m, k) * B(k, n));
        }
        const double chain = std::min<double>(sizes_.depth, kDenseDepth) + sizes_.depth / 128.0;
        const double allowed =
            UnitOf(product.c_element) * std::fabs(sum) + chain * kFloatUnit * size;
        const double ratio = std::fabs(read[m * sizes_.columns + n] - sum) / (allowed + 1e-30);
        if (std::isnan(ratio)) return INFINITY;
        most = std::max(most, ratio);
      }
    }
    return most;
  }

  DenseProduct product;

 private:
  int64_t AStride() const { return orders_.a == DenseOrder::kRows ? sizes_.depth : sizes_.rows; }
  int64_t AIndex(int64_t m, int64_t k) const {
    return orders_.a == DenseOrder::kRows ? m * sizes_.depth + k : k * sizes_.rows + m;
  }
  int64_t BIndex(int64_t k, int64_t n) const {
    return orders_.b == DenseOrder::kPanels ? n * sizes_.depth + k : k * sizes_.columns + n;
  }

  Random random_;
  const ProductCase sizes_;
  const Orders orders_;
  Stored a_, b_;
  std::vector<uint8_t> panels_;

 public:
  Stored c;
};

TEST_P(DenseTest, ProductsAreSumsWithinTheirRounding) {
  for (ElementType element : kElements) {
    for (const Orders& orders : kOrders) {
      for (const ProductCase& sizes : kProducts) {
        ProductUnderTest test(sizes, orders, element);
        RunProduct(test.product);
        EXPECT_LE(test.ErrorRatio(), 1.01)
            << ElementName(element) << " " << sizes.rows << "x" << sizes.columns << "x"
            << sizes.depth << " orders " << int(orders.a) << int(orders.b);
      }
    }
  }
}

TEST_P(DenseTest, RowsHaveTheSameBitsHoweverTheyAreCut) {
  for (const Orders& orders : kOrders) {
    ProductUnderTest test({100, 130, 300}, orders, ElementType::kBFloat16);
    RunProduct(test.product);
    const std::vector<uint8_t> whole = test.c.bytes;
    test.product.item_rows = kFewestDenseRows;
    RunProduct(test.product);
    EXPECT_EQ(test.c.bytes, whole);
    if (orders.a != DenseOrder::kRows) continue;
    for (int64_t row = 0; row < 100; ++row) {  // each alone
      DenseProduct one = test.product;
      one.rows = 1;
      one.a.data = static_cast<const uint8_t*>(one.a.data) + row * 300 * 2;
      one.c = static_cast<uint8_t*>(one.c) + row * 130 * 2;
      RunProduct(one);
    }
    EXPECT_EQ(test.c.bytes, whole);
  }
}

TEST_P(DenseTest, BlocksOfDepthGoOnFromWhatStandsThere) {
  for (ElementType element : kElements) {
    ProductUnderTest test({60, 70, 2100}, kOrders[2], element);
    std::vector<float> sums(60 * 70);
    test.product.result = DenseResult::kAddBlocks;
    test.product.c = sums.data();
    test.product.c_element = ElementType::kFloat32;
    RunProduct(test.product);
    EXPECT_LE(test.ErrorRatioOf(Numbers(sums.begin(), sums.end())), 1.01);
    const std::vector<float> whole = sums;
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t first : {0, 1024}) {
      DenseProduct part = test.product;
      part.depth = first == 0 ? 1024 : 2100 - 1024;
      const int64_t bytes = first * ElementBytes(element);
      part.a.data = static_cast<const uint8_t*>(part.a.data) + bytes * 60;
      part.b.data = static_cast<const uint8_t*>(part.b.data) + bytes * 70;
      RunProduct(part);
    }
    EXPECT_EQ(sums, whole) << ElementName(element);
  }
}

TEST_P(DenseTest, WhatIsNotFiniteStaysInItsRowAndColumn) {
  constexpr int64_t kRow = 17, kColumn = 33;
  for (ElementType element : kElements) {
    for (const Orders& orders : kOrders) {
      ProductUnderTest test({40, 70, 600}, orders, element);
      RunProduct(test.product);
      const Numbers before = test.c.Read();
      test.SetA(kRow, 599, -INFINITY);
      test.SetB(3, kColumn, NAN);
      RunProduct(test.product);
      const Numbers after = test.c.Read();
      for (int64_t m = 0; m < 40; ++m) {
        for (int64_t n = 0; n < 70; ++n) {
          const double number = after[m * 70 + n];
          if (n == kColumn) {
            EXPECT_TRUE(std::isnan(number)) << m;
          } else if (m == kRow) {
            EXPECT_EQ(number, test.B(599, n) > 0 ? -INFINITY : INFINITY) << n;
          } else {
            EXPECT_EQ(number, before[m * 70 + n]) << m << " " << n;
          }
        }
      }
    }
  }
}

TEST_P(DenseTest, OperandsAreRoundedBeforeTheyAreMultiplied) {
  for (const Orders& orders : kOrders) {
    const ProductCase sizes{50, 70, 600};
    ProductUnderTest wide(sizes, orders, ElementType::kFloat32),
        rounded(sizes, orders, ElementType::kBFloat16);  // of the same random numbers
    rounded.product.c = wide.product.c = wide.c.bytes.data();
    rounded.product.c_element = ElementType::kFloat32;
    RunProduct(rounded.product);
    const std::vector<uint8_t> expected = wide.c.bytes;
    wide.product.operand = ElementType::kBFloat16;
    wide.Pack();
    RunProduct(wide.product);
    EXPECT_EQ(wide.c.bytes, expected) << int(orders.a) << int(orders.b);
  }
}

// ---- Pointwise functions.

TEST_P(DenseTest, CurvesAndTheirSlopesAreTheReferences) {
  constexpr int kCount = 4001;
  std::vector<float> x(kCount), y(kCount), slope(kCount), ones(kCount, 1.0f);
  for (int n = 0; n < kCount; ++n) x[n] = static_cast<float>((n - 2000) / 150.0);  // ±13.3
  for (int kind = 1; kind <= 6; ++kind) {
    const Curve curve = static_cast<Curve>(kind);
    ApplyCurve(curve, {x.data()}, {y.data()}, {0, kCount});
    ApplyCurveSlope(curve, {x.data()}, {ones.data()}, {slope.data()}, false, {0, kCount});
    for (int n = 0; n < kCount; ++n) {
      const double size = std::max(1.0, std::fabs(double{x[n]}));
      const auto of = static_cast<ActivationKind>(kind);
      EXPECT_NEAR(y[n], Activate(of, x[n]), 8 * kFloatUnit * size) << kind << " at " << x[n];
      // Slopes multiply by x twice or three times where arguments are cubes.
      EXPECT_NEAR(slope[n], ActivationSlope(of, x[n]), 16 * kFloatUnit * size) << kind << x[n];
    }
    float odd[3] = {NAN, INFINITY, 1e30f}, out[3];
    ApplyCurve(curve, {odd}, {out}, {0, 3});
    EXPECT_TRUE(std::isnan(out[0])) << kind;
    EXPECT_EQ(out[1], curve == Curve::kTanh ? 1 : INFINITY) << kind;
    EXPECT_EQ(out[2], curve == Curve::kTanh ? 1 : 1e30f) << kind;
  }
}

// Both are NaN, or the same infinity, or finite.
void ExpectAlike(float got, double expected, int kind, float x) {
  const bool is_finite = std::isfinite(got) && std::isfinite(expected);
  const bool is_nan = std::isnan(got) && std::isnan(expected);
  EXPECT_TRUE(is_finite || is_nan || got == expected) << kind << " at " << x << ": " << got;
}

// Where a number or a gradient is not finite, as the reference; a relu lets none through that it
// would not let through were it finite.
TEST_P(DenseTest, CurvesOfWhatIsNotFiniteAreTheReferences) {
  constexpr float kOdd[] = {NAN, INFINITY, -INFINITY, -1, 0, 1};
  for (int kind = 1; kind <= 6; ++kind) {
    const Curve curve = static_cast<Curve>(kind);
    const auto of = static_cast<ActivationKind>(kind);
    for (const float x : kOdd) {
      float y = 0;
      ApplyCurve(curve, {&x}, {&y}, {0, 1});
      ExpectAlike(y, Activate(of, x), kind, x);
      for (const float dy : {NAN, INFINITY, -INFINITY, 0.0f, 1.0f}) {
        float dx = 0;
        ApplyCurveSlope(curve, {&x}, {&dy}, {&dx}, false, {0, 1});
        ExpectAlike(dx, ActivationGradient(of, x, dy), kind, x);
      }
    }
  }
}

TEST_P(DenseTest, DropsWhatTheReferenceDrops) {
  Random random(5);
  for (ElementType element : kElements) {
    constexpr int64_t kRows = 9, kColumns = 700;
    Stored in(random, element, kRows * kColumns), out(random, element, kRows * kColumns);
    const DropoutPlace place{.seed = 77, .offset = uint64_t{3} << 32 | 5, .first_row = 1000};
    Numbers expected = ApplyDropout(place, 26, kColumns, in.numbers);
    Rounder(Rounding::kElements).To(element, expected);
    DropRows({77, uint64_t{3} << 32 | 5, 26, 1000}, kColumns, in.tensor(), out.tensor(), false,
             {0, kRows});
    const Numbers read = out.Read();
    for (size_t n = 0; n < read.size(); ++n) {
      ASSERT_NEAR(read[n], expected[n], 4 * UnitOf(element) * std::fabs(expected[n])) << n;
    }
  }
}

TEST_P(DenseTest, AddsWithARoundingOfEachShareAndOfTheSum) {
  Random random(6);
  for (ElementType element : kElements) {
    constexpr int64_t kCount = 77;
    Stored a(random, ElementType::kFloat32, kCount), b(random, element, kCount),
        out(random, element, kCount);
    Combine(Combination::kProduct, a.tensor(), 0.5f, b.tensor(), out.tensor(), true, {0, kCount});
    const Rounder round(Rounding::kElements);
    const Numbers read = out.Read();
    for (int64_t n = 0; n < kCount; ++n) {
      const double share = round.To(element, a.numbers[n] * (0.5 * b.numbers[n]));
      EXPECT_EQ(read[n], round.To(element, out.numbers[n] + share)) << n;
    }
  }
}

TEST_P(DenseTest, CopiesColumnsAndSumsThem) {
  Random random(7);
  constexpr int64_t kRows = 1500, kColumns = 20;
  Stored in(random, ElementType::kBFloat16, kRows * kColumns),
      out(random, ElementType::kFloat32, kRows * 7);
  CopyColumns(in.tensor(), {kColumns, 11}, out.tensor(), {7, 2}, 5, true, {0, kRows});
  const Numbers read = out.Read();
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t n = 0; n < 7; ++n) {
      const double added = n < 2 ? 0 : in.numbers[row * kColumns + 11 + n - 2];
      const double old = out.numbers[row * 7 + n];
      ASSERT_EQ(read[row * 7 + n], static_cast<float>(old + added)) << row << " " << n;
    }
  }
  std::vector<float> sums(kColumns, 3.0f);
  AddColumnSums({in.tensor(), ElementType::kBFloat16, kRows, kColumns, sums.data()}, {0, kColumns});
  for (int64_t n = 0; n < kColumns; ++n) {
    double sum = 3, size = 3;
    for (int64_t row = 0; row < kRows; ++row) {
      sum += in.numbers[row * kColumns + n];
      size += std::fabs(in.numbers[row * kColumns + n]);
    }
    EXPECT_NEAR(sums[n], sum, 66 * kFloatUnit * size);
  }
}

// ---- Norms.

TEST_P(DenseTest, NormsAndTheirGradientsAreTheReferences) {
  Random random(8);
  for (bool is_centred : {false, true}) {
    for (int64_t count : {1, 8, 48, 700}) {
      constexpr int64_t kVectors = 40;
      const ElementType element = ElementType::kFloat32;
      Stored x(random, element, kVectors * count), dy(random, element, kVectors * count),
          weight(random, element, count), bias(random, element, count),
          y(random, element, kVectors * count), dx(random, element, kVectors * count);
      NormOperands norm{.count = count,
                        .is_centred = is_centred,
                        .epsilon = 1e-2f,
                        .weight_offset = 1,
                        .weight = weight.tensor(),
                        .x = x.tensor()};
      NormRule rule{.kind = is_centred ? NormKind::kLayer : NormKind::kRms,
                    .epsilon = norm.epsilon,
                    .weight_offset = 1,
                    .weight = &weight.numbers};
      if (is_centred) norm.bias = bias.tensor(), rule.bias = &bias.numbers;
      const Rounder exact(Rounding::kExact);
      NormForward(norm, y.tensor(), {0, kVectors});
      const Numbers y_read = y.Read(), expected = NormForward(rule, count, x.numbers, exact);
      std::vector<NormStatistics> statistics(kVectors);
      NormBackward(norm, dy.tensor(), dx.tensor(), false, statistics.data(), {0, kVectors});
      const Numbers dx_read = dx.Read(),
                    d_in = NormInputGradient(rule, count, x.numbers, dy.numbers);
      for (size_t n = 0; n < y_read.size(); ++n) {
        ASSERT_NEAR(y_read[n], expected[n], 1e-5) << is_centred << " " << count;
        ASSERT_NEAR(dx_read[n], d_in[n], 1e-4) << is_centred << " " << count;
      }
      std::vector<float> d_weight(count), d_bias(count);
      AddNormGradients(norm,
                       {.dy = dy.tensor(),
                        .statistics = statistics.data(),
                        .vectors = kVectors,
                        .d_weight = d_weight.data(),
                        .d_bias = d_bias.data()},
                       {0, count});
      Numbers w(count), b(count);
      AddNormGradients(rule, count, 1, x.numbers, dy.numbers, exact, &w, &b);
      for (int64_t n = 0; n < count; ++n) {
        EXPECT_NEAR(d_weight[n], w[n], 1e-4);
        EXPECT_NEAR(d_bias[n], b[n], 1e-4);
      }
    }
  }
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  const int64_t usable = CompiledCpuTargets() & hwy::SupportedTargets();
  for (int64_t bit = 1; bit <= usable && bit > 0; bit <<= 1) {
    if ((usable & bit) != 0) targets.push_back(bit);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(All, DenseTest, testing::ValuesIn(Targets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

}  // namespace
}  // namespace attnd
