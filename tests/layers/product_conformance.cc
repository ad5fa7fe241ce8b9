#include "tests/layers/product_conformance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/layers/device_tensors.h"

namespace attnd {
namespace {

// A product C [rows, columns] of A [rows, depth] and B [depth, columns], however they lie.
struct Case {
  int64_t rows, columns, depth;
  bool bias = false, add = false, c_is_float = false;

  std::string Name() const { return absl::StrCat(rows, "x", columns, "x", depth); }
};

struct Matrix {
  int64_t rows, columns;
  Numbers numbers;
  double At(int64_t row, int64_t column) const { return numbers[row * columns + column]; }
};
Matrix RandomMatrix(Random& random, int64_t rows, int64_t columns, ElementType element) {
  return {rows, columns,
          RandomNumbers(random, rows * columns, Rounder(Rounding::kElements), element)};
}
Matrix Transposed(const Matrix& m) {
  Matrix t{m.columns, m.rows, Numbers(m.numbers.size())};
  for (int64_t row = 0; row < m.rows; ++row) {
    for (int64_t n = 0; n < m.columns; ++n) t.numbers[n * m.rows + row] = m.At(row, n);
  }
  return t;
}

double UnitOf(ElementType element) {
  return element == ElementType::kFloat32   ? 0x1p-24
         : element == ElementType::kFloat16 ? 0x1p-11
                                            : 0x1p-8;
}

// Every number of c is old + A·B + bias. Sums lose a unit of float32, truncated, for every four
// products, float32 numbers cut into two of TF32 their last bits; each rounding to the element half
// a unit.
void ExpectProduct(const Numbers& c, const Matrix& a, const Matrix& b, const Numbers& old,
                   const Numbers& bias, ElementType element, ElementType operand) {
  const double of_terms = operand == ElementType::kFloat32 ? 0x1p-21 : 0;
  int wrong = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t column = 0; column < b.columns; ++column) {
      const int64_t at = row * b.columns + column;
      double sum = bias.empty() ? 0 : bias[column], size = std::abs(sum);
      for (int64_t k = 0; k < a.columns; ++k) {
        const double term = a.At(row, k) * b.At(k, column);
        sum += term;
        size += std::abs(term);
      }
      const double before = old.empty() ? 0 : old[at];
      const double error = size * 0x1p-23 * (1 + static_cast<double>(a.columns) / 4) +
                           size * of_terms +
                           UnitOf(element) * (2 * std::abs(sum) + std::abs(before)) + 0x1p-24;
      if (!(std::abs(c[at] - (before + sum)) <= error) && wrong++ < 3) {
        ADD_FAILURE() << row << ", " << column << ": expected " << before + sum << " +- " << error
                      << ", got " << c[at];
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

class Product {
 public:
  Product(cuda::CudaBackend& engine, ElementType element) : engine_(engine), element_(element) {}

  Numbers OfWeights(const Matrix& a, const Matrix& b, const Case& c, bool is_transposed,
                    const Numbers& old, const Numbers& bias) {
    DeviceTensors tensors(engine_, a.rows * a.columns + b.rows * b.columns + a.rows * b.columns);
    const ElementType to = c.c_is_float ? ElementType::kFloat32 : element_;
    const Tensor out = tensors.Put(old.empty() ? Numbers(a.rows * b.columns, NAN) : old, to);
    const Matrix stored = is_transposed ? Transposed(b) : b;
    WeightProduct product{.rows = a.rows,
                          .a = tensors.Put(a.numbers, element_),
                          .weight = {.weight = tensors.Put(stored.numbers, element_),
                                     .rows = stored.rows,
                                     .columns = stored.columns,
                                     .operand = element_},
                          .is_transposed = is_transposed,
                          .c = out,
                          .add = !old.empty()};
    if (!bias.empty()) product.bias = tensors.Put(bias, element_);
    tensors.device().Multiply(product);
    return tensors.Get(out, a.rows * b.columns);
  }

  // Computes gradients, in calls of `part` rows.
  Numbers OfRows(const Matrix& x, const Matrix& dy, const Numbers& old, int64_t part) {
    return OfRows(x, dy, old, part, Numbers(x.columns), true)[0];
  }
  // And sums of x's columns, added to others by the gradients' calls or by calls of their own.
  std::array<Numbers, 2> OfRows(const Matrix& x, const Matrix& dy, const Numbers& old, int64_t part,
                                const Numbers& old_columns, bool is_beside) {
    DeviceTensors tensors(engine_, x.rows * (x.columns + dy.columns) + x.columns * dy.columns);
    const Tensor sums = tensors.Put(old, ElementType::kFloat32);
    const Tensor columns = tensors.Put(old_columns, ElementType::kFloat32);
    const Tensor a = tensors.Put(x.numbers, element_), b = tensors.Put(dy.numbers, element_);
    auto* const of_columns = static_cast<float*>(columns.data);
    for (int64_t first = 0; first < x.rows; first += part) {
      const GradientProduct product{.rows = std::min(part, x.rows - first),
                                    .a = Behind(a, first * x.columns),
                                    .b = Behind(b, first * dy.columns),
                                    .a_columns = x.columns,
                                    .b_columns = dy.columns,
                                    .operand = element_,
                                    .sums = static_cast<float*>(sums.data),
                                    .column_sums = is_beside ? of_columns : nullptr};
      tensors.device().AddGradient(product);
      if (is_beside) continue;
      tensors.device().AddColumnSums({product.a, element_, product.rows, x.columns, of_columns});
    }
    return {tensors.Get(sums, x.columns * dy.columns), tensors.Get(columns, x.columns)};
  }

 private:
  ConstTensor Behind(const Tensor& t, int64_t numbers) const {
    return {static_cast<std::byte*>(t.data) + numbers * ElementBytes(element_), element_};
  }
  cuda::CudaBackend& engine_;
  const ElementType element_;
};

// Whole tiles and cut ones, few rows, depths that end within a step.
constexpr Case kCases[] = {
    {.rows = 1, .columns = 8, .depth = 8},
    {.rows = 128, .columns = 128, .depth = 32, .bias = true},
    {.rows = 130, .columns = 136, .depth = 40, .add = true},
    {.rows = 67, .columns = 264, .depth = 104, .bias = true},
    {.rows = 257, .columns = 24, .depth = 72, .add = true},
    {.rows = 33, .columns = 72, .depth = 8, .bias = true, .c_is_float = true},
    {.rows = 5, .columns = 72, .depth = 64, .add = true, .c_is_float = true},
    // These have no whole chunks.
    {.rows = 9, .columns = 12, .depth = 16},
    {.rows = 9, .columns = 16, .depth = 13, .add = true}};

// Cases of gradients: rows, columns of a and b. Blocks of rows take turns.
constexpr std::array<int64_t, 3> kGradientCases[] = {
    {1, 8, 16},      {37, 136, 24},    {1100, 16, 136}, {2100, 72, 8},
    {3100, 24, 200}, {2100, 264, 136}, {4200, 520, 16}, {40, 12, 20}};

// A case multiplies and adds these, drawn in the order of members.
struct Drawn {
  ElementType to;  // of C
  Matrix a, b;
  Numbers bias, old;
  Drawn(Random& random, const Case& c, ElementType element)
      : to(c.c_is_float ? ElementType::kFloat32 : element),
        a(RandomMatrix(random, c.rows, c.depth, element)),
        b(RandomMatrix(random, c.depth, c.columns, element)),
        bias(Draw(random, c.bias ? c.columns : 0, element)),
        old(Draw(random, c.add ? c.rows * c.columns : 0, to)) {}
  static Numbers Draw(Random& random, int64_t count, ElementType element) {
    return RandomNumbers(random, count, Rounder(Rounding::kElements), element);
  }
};

TEST_P(ProductConformance, AreSumsOfProducts) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(1);
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.Name());
    const Drawn drawn(random, c, element);
    for (bool is_transposed : {true, false}) {
      SCOPED_TRACE(is_transposed ? "transposed" : "as it lies");
      const Numbers made =
          Product(*engine, element)
              .OfWeights(drawn.a, drawn.b, c, is_transposed, drawn.old, drawn.bias);
      ExpectProduct(made, drawn.a, drawn.b, drawn.old, drawn.bias, drawn.to, element);
    }
  }
}

TEST_P(ProductConformance, GradientsAreSumsOverRows) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(2);
  for (const auto& [rows, a_columns, b_columns] : kGradientCases) {
    SCOPED_TRACE(absl::StrCat(rows, "x", a_columns, "x", b_columns));
    const Matrix x = RandomMatrix(random, rows, a_columns, element);
    const Matrix dy = RandomMatrix(random, rows, b_columns, element);
    const Numbers old = RandomNumbers(random, a_columns * b_columns, Rounder(Rounding::kElements),
                                      ElementType::kFloat32);
    const Numbers whole = Product(*engine, element).OfRows(x, dy, old, rows);
    ExpectProduct(whole, Transposed(x), dy, old, {}, ElementType::kFloat32, element);
    EXPECT_TRUE(SameBits(whole, Product(*engine, element).OfRows(x, dy, old, 1024)));
  }
}

TEST_P(ProductConformance, GradientsAddColumnsToTheBitsOfSums) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(7);
  constexpr std::array<int64_t, 3> kCasesOfColumns[] = {
      {37, 136, 24}, {1100, 264, 8}, {2100, 16, 136}};
  for (const auto& [rows, a_columns, b_columns] : kCasesOfColumns) {
    SCOPED_TRACE(absl::StrCat(rows, "x", a_columns, "x", b_columns));
    const Matrix x = RandomMatrix(random, rows, a_columns, element);
    const Matrix dy = RandomMatrix(random, rows, b_columns, element);
    const Numbers zeros(a_columns * b_columns);
    const Numbers some(x.numbers.begin(), x.numbers.begin() + a_columns);
    Product product(*engine, element);
    const Numbers apart = product.OfRows(x, dy, zeros, rows, some, false)[1];
    EXPECT_TRUE(SameBits(apart, product.OfRows(x, dy, zeros, rows, some, true)[1]));
    EXPECT_TRUE(SameBits(apart, product.OfRows(x, dy, zeros, 1024, some, true)[1]));
  }
}

TEST_P(ProductConformance, RowsHaveTheirBitsInAnyCall) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(3);
  const Case c{.rows = 200, .columns = 136, .depth = 104};
  const Matrix a = RandomMatrix(random, c.rows, c.depth, element);
  const Matrix b = RandomMatrix(random, c.depth, c.columns, element);
  const Numbers whole = Product(*engine, element).OfWeights(a, b, c, true, {}, {});
  for (int64_t first : {0, 77, 199}) {
    Matrix some{std::min<int64_t>(61, c.rows - first), c.depth, {}};
    some.numbers.assign(a.numbers.begin() + first * c.depth,
                        a.numbers.begin() + (first + some.rows) * c.depth);
    const Numbers part = Product(*engine, element).OfWeights(some, b, c, true, {}, {});
    EXPECT_TRUE(SameBits(part, Numbers(whole.begin() + first * c.columns,
                                       whole.begin() + (first + some.rows) * c.columns)))
        << first;
  }
}

// As many rows as keep every multiprocessor busy with large or wide tiles, and few of them alone.
// On a large GPU gradients take turns.
TEST_P(ProductConformance, RowsHaveTheirBitsInTilesOfAnySize) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  const int64_t multiprocessors = engine->device().multiprocessors();
  Random random(5);
  const Case c{.rows = 128 * multiprocessors, .columns = 384, .depth = 24 * multiprocessors};
  const Matrix a = RandomMatrix(random, c.rows, c.depth, element);
  const Matrix b = RandomMatrix(random, c.depth, c.columns, element);
  Matrix some{64, c.depth, {}};
  some.numbers.assign(a.numbers.begin(), a.numbers.begin() + some.rows * c.depth);
  const auto in_layout = [&](const Matrix& of, int layout) {
    Product product(*engine, element);
    if (layout < 2) return product.OfWeights(of, b, c, layout == 0, {}, {});
    return product.OfRows(Transposed(of), b, Numbers(of.rows * c.columns), c.depth);
  };
  for (int layout = 0; layout < 3; ++layout) {
    const Numbers whole = in_layout(a, layout), part = in_layout(some, layout);
    EXPECT_TRUE(SameBits(part, Numbers(whole.begin(), whole.begin() + some.rows * c.columns)))
        << layout;
  }
}

// C by each layout of A and B.
std::array<Numbers, 3> OfLayouts(cuda::CudaBackend& engine, const Matrix& a, const Matrix& b) {
  Product product(engine, ElementType::kFloat32);
  const Case c{.rows = a.rows, .columns = b.columns, .depth = a.columns};
  return {product.OfWeights(a, b, c, true, {}, {}), product.OfWeights(a, b, c, false, {}, {}),
          product.OfRows(Transposed(a), b, Numbers(a.rows * b.columns), a.columns)};
}

// As one chain of float32 would have it; exact; and the sum of magnitudes.
struct Sums {
  float chain = 0;
  double exact = 0, size = 0;
};
Sums SumsAt(const Matrix& a, const Matrix& b, int64_t row, int64_t column) {
  Sums sums;
  for (int64_t k = 0; k < a.columns; ++k) {
    const double x = a.At(row, k), y = b.At(k, column);
    sums.chain = std::fma(static_cast<float>(x), static_cast<float>(y), sums.chain);
    sums.exact += x * y;
    sums.size += std::fabs(x * y);
  }
  return sums;
}

// Root mean squares of errors over the sums of magnitudes, of the device over those of a chain.
double ErrorOverChain(const Numbers& c, const Matrix& a, const Matrix& b) {
  double own = 0, chain = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t column = 0; column < b.columns; ++column) {
      const Sums sums = SumsAt(a, b, row, column);
      own += std::pow((c[row * b.columns + column] - sums.exact) / sums.size, 2);
      chain += std::pow((sums.chain - sums.exact) / sums.size, 2);
    }
  }
  return std::sqrt(own / chain);
}

TEST_P(FloatProductConformance, ErrorsAreAtMostTwiceThoseOfAChain) {
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(7);
  const auto positive = [](Matrix m) {
    for (double& x : m.numbers) x = std::fabs(x);
    return m;
  };
  // 1e-18 to 1e18.
  const auto wide = [&](Matrix m) {
    for (double& x : m.numbers) x = static_cast<float>(std::ldexp(x, random.Bits() % 121 - 60));
    return m;
  };
  for (int64_t depth : {16, 64, 768}) {
    SCOPED_TRACE(depth);
    const Matrix a = RandomMatrix(random, 72, depth, ElementType::kFloat32);
    const Matrix b = RandomMatrix(random, depth, 40, ElementType::kFloat32);
    for (const Numbers& c : OfLayouts(*engine, a, b)) EXPECT_LE(ErrorOverChain(c, a, b), 2);
    const Matrix x = positive(a), y = positive(b);
    for (const Numbers& c : OfLayouts(*engine, x, y)) EXPECT_LE(ErrorOverChain(c, x, y), 2);
    // Sums are a few numbers, of which the chain rounds each once.
    const Matrix v = wide(a), w = wide(b);
    for (const Numbers& c : OfLayouts(*engine, v, w)) {
      EXPECT_LE(ErrorOverChain(c, v, w), 3);
      ExpectProduct(c, v, w, {}, {}, ElementType::kFloat32, ElementType::kFloat32);
    }
  }
}

// Infinities and NaN reach what a chain would have them reach, and no other number's bits.
TEST_P(FloatProductConformance, InfinitiesAndNanHaveTheirPlaces) {
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(8);
  Matrix a = RandomMatrix(random, 136, 40, ElementType::kFloat32);
  Matrix b = RandomMatrix(random, 40, 72, ElementType::kFloat32);
  for (double& x : b.numbers) x /= 16;
  const std::array<Numbers, 3> finite = OfLayouts(*engine, a, b);
  constexpr double kMost = std::numeric_limits<float>::max();
  const auto row = [&](int64_t n, int64_t k, double x) { a.numbers[n * a.columns + k] = x; };
  const auto column = [&](int64_t n, int64_t k, double x) { b.numbers[k * b.columns + n] = x; };
  row(3, 5, INFINITY);
  row(7, 0, NAN);
  row(9, 1, INFINITY), row(9, 30, -INFINITY);
  row(70, 8, -INFINITY), row(70, 12, -INFINITY);
  row(130, 39, kMost);
  column(2, 5, INFINITY);
  column(4, 8, 0), column(4, 5, 0);
  column(6, 20, NAN);
  column(70, 39, -INFINITY);
  const auto is_special = [](int64_t n, std::initializer_list<int64_t> all) {
    return std::find(all.begin(), all.end(), n) != all.end();
  };
  const std::array<Numbers, 3> results = OfLayouts(*engine, a, b);
  for (size_t layout = 0; layout < 3; ++layout) {
    SCOPED_TRACE(layout);
    for (int64_t m = 0; m < a.rows; ++m) {
      for (int64_t n = 0; n < b.columns; ++n) {
        const double got = results[layout][m * b.columns + n];
        const Sums sums = SumsAt(a, b, m, n);
        if (!std::isfinite(sums.chain)) {
          ASSERT_TRUE(std::isnan(sums.chain) ? std::isnan(got) : got == sums.chain)
              << m << ", " << n << ": expected " << sums.chain << ", got " << got;
        } else if (is_special(m, {3, 7, 9, 70, 130}) || is_special(n, {2, 4, 6, 70})) {
          ASSERT_LE(std::fabs(got - sums.exact), 0x1p-20 * sums.size) << m << ", " << n;
        } else {
          ASSERT_EQ(got, finite[layout][m * b.columns + n]) << m << ", " << n;
        }
      }
    }
  }
}

// Numbers below 2^-113 have last bits below those of a TF32 number.
TEST_P(FloatProductConformance, SmallNumbersLoseAtMostTheLastOfTf32) {
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(9);
  Matrix a = RandomMatrix(random, 24, 48, ElementType::kFloat32);
  const Matrix b = RandomMatrix(random, 48, 16, ElementType::kFloat32);
  for (size_t n = 0; n < a.numbers.size(); ++n) {
    a.numbers[n] = static_cast<float>(std::ldexp(a.numbers[n], -110 - static_cast<int>(n) % 40));
  }
  for (const Numbers& c : OfLayouts(*engine, a, b)) {
    for (int64_t row = 0; row < a.rows; ++row) {
      for (int64_t column = 0; column < b.columns; ++column) {
        const Sums sums = SumsAt(a, b, row, column);
        double lost = 0;
        for (int64_t k = 0; k < a.columns; ++k) lost += 0x1p-135 * std::fabs(b.At(k, column));
        EXPECT_LE(std::fabs(c[row * b.columns + column] - sums.exact), 0x1p-20 * sums.size + lost);
      }
    }
  }
}

// As ColumnSumsDesc says: stretches of 32 rows, in order, then blocks of rows, in order.
Numbers AddedColumns(Numbers sums, const Numbers& in, const Numbers* factors, int64_t block_rows) {
  const auto columns = static_cast<int64_t>(sums.size());
  const int64_t rows = static_cast<int64_t>(in.size()) / columns;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t block = 0; block < rows; block += block_rows) {
      float of_block = 0;
      const int64_t end = std::min(rows, block + block_rows);
      for (int64_t stretch = block; stretch < end; stretch += 32) {
        float sum = 0;
        for (int64_t row = stretch; row < std::min(end, stretch + 32); ++row) {
          const int64_t n = row * columns + column;
          const auto number = static_cast<float>(in[n]);
          sum = factors == nullptr ? sum + number
                                   : std::fma(number, static_cast<float>((*factors)[n]), sum);
        }
        of_block += sum;
      }
      sums[column] = static_cast<float>(sums[column]) + of_block;
    }
  }
  return sums;
}

TEST_P(ProductConformance, SumsOfColumnsAreInOrder) {
  const ElementType element = GetParam().element, wide = ElementType::kFloat32;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(4);
  const Rounder round(Rounding::kElements);
  struct Sums {
    int64_t rows, columns, per_row;
  };
  for (const Sums& c : {Sums{3, 40, 1}, {2500, 40, 1}, {(2048 + 100) * 5, 40, 5}}) {
    SCOPED_TRACE(absl::StrCat(c.rows, "x", c.columns, " of ", c.per_row));
    DeviceTensors tensors(*engine, 0);
    const Numbers in = RandomMatrix(random, c.rows, c.columns, element).numbers;
    const Numbers old = RandomNumbers(random, c.columns, round, wide);
    const Tensor on_device = tensors.Put(in, element);
    for (bool again : {false, true}) {  // turns are left as they were found
      SCOPED_TRACE(again);
      const Tensor sums = tensors.Put(old, wide);
      tensors.device().AddColumnSums(
          {on_device, element, c.rows, c.columns, static_cast<float*>(sums.data)});
      EXPECT_TRUE(SameBits(tensors.Get(sums, c.columns), AddedColumns(old, in, nullptr, 1024)));
    }
    const Numbers x = RandomMatrix(random, c.rows, c.columns, element).numbers;
    const Numbers statistics = RandomNumbers(random, c.rows * 2, round, wide);
    Numbers normalised(x.size());
    for (size_t n = 0; n < x.size(); ++n) {
      const size_t row = n / c.columns;
      const float away = static_cast<float>(x[n]) - static_cast<float>(statistics[2 * row]);
      normalised[n] = away * static_cast<float>(statistics[2 * row + 1]);
    }
    const Tensor d_weight = tensors.Put(old, wide), d_bias = tensors.Put(old, wide);
    tensors.device().AddNormGradients(
        {.count = c.columns, .x = tensors.Put(x, element)},
        {.dy = on_device,
         .statistics = static_cast<const NormStatistics*>(tensors.Put(statistics, wide).data),
         .vectors = c.rows,
         .per_row = c.per_row,
         .d_weight = static_cast<float*>(d_weight.data),
         .d_bias = static_cast<float*>(d_bias.data)});
    const int64_t block = 1024 * c.per_row;
    EXPECT_TRUE(
        SameBits(tensors.Get(d_weight, c.columns), AddedColumns(old, in, &normalised, block)));
    EXPECT_TRUE(SameBits(tensors.Get(d_bias, c.columns), AddedColumns(old, in, nullptr, block)));
  }
}

// Whole 16 bytes and others, of one step of a warp and of several.
constexpr int64_t kNormWidths[] = {8, 100, 127, 768, 1024, 1032, 2056, 2051};
constexpr int64_t kNormVectors = 5;

struct NormInputs {
  Numbers x, dy, weight, bias;
  NormInputs(Random& random, int64_t width, ElementType element)
      : x(RandomMatrix(random, kNormVectors, width, element).numbers),
        dy(RandomMatrix(random, kNormVectors, width, element).numbers) {
    const Rounder round(Rounding::kElements);
    weight = RandomNumbers(random, width, round, ElementType::kFloat32);
    bias = RandomNumbers(random, width, round, ElementType::kFloat32);
  }
};
// y and dx of a layer norm or, without a mean and a bias, of an RMS norm, in double.
struct NormResults {
  Numbers y, dx;
  NormResults(const NormInputs& in, bool is_centred, double epsilon) : y(in.x.size()), dx(y) {
    const size_t width = in.weight.size();
    for (size_t begin = 0; begin < y.size(); begin += width) {
      double mean = 0, squares = 0, sum = 0, along = 0;
      for (size_t n = 0; n < width; ++n) mean += is_centred ? in.x[begin + n] / width : 0;
      for (size_t n = 0; n < width; ++n) squares += std::pow(in.x[begin + n] - mean, 2) / width;
      const double rstd = 1 / std::sqrt(squares + epsilon);
      const auto of = [&](size_t n) { return (in.x[begin + n] - mean) * rstd; };
      for (size_t n = 0; n < width; ++n) {
        const double dn = in.dy[begin + n] * in.weight[n];
        sum += is_centred ? dn / width : 0;
        along += dn * of(n) / width;
      }
      for (size_t n = 0; n < width; ++n) {
        y[begin + n] = of(n) * in.weight[n] + (is_centred ? in.bias[n] : 0);
        dx[begin + n] = (in.dy[begin + n] * in.weight[n] - sum - of(n) * along) * rstd;
      }
    }
  }
};

TEST_P(ProductConformance, NormsOfAnyWidthAreCloseAndChainsAroundThemGiveTheBitsOfSingleOps) {
  const ElementType element = GetParam().element, wide = ElementType::kFloat32;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  const double bound = element == ElementType::kFloat32    ? 1e-5
                       : element == ElementType::kBFloat16 ? 1e-2
                                                           : 2e-3;
  Random random(7);
  const DropoutRule drop{.seed = 3, .threshold = 64};
  for (int64_t width : kNormWidths) {
    for (bool is_centred : {true, false}) {
      SCOPED_TRACE(absl::StrCat(width, is_centred ? ", layer norm" : ", RMS norm"));
      const int64_t count = kNormVectors * width;
      const NormInputs in(random, width, element);
      const NormResults expected(in, is_centred, 1e-5);
      DeviceTensors tensors(*engine, 16 * count);
      CudaDevice& device = tensors.device();
      const Tensor weight = tensors.Put(in.weight, wide), bias = tensors.Put(in.bias, wide);
      const Tensor statistics = tensors.Put(Numbers(2 * kNormVectors), wide);
      const auto room = [&] { return tensors.Put(Numbers(count), element); };
      NormOperands norm{.count = width,
                        .is_centred = is_centred,
                        .epsilon = 1e-5f,
                        .weight = weight,
                        .x = tensors.Put(in.x, element)};
      if (is_centred) norm.bias = bias;
      const Tensor y = room(), dx = room(), dy = tensors.Put(in.dy, element);
      device.Norm(norm, y, kNormVectors);
      device.NormBackward(norm, dy, dx, false, static_cast<NormStatistics*>(statistics.data),
                          kNormVectors);
      const Numbers got = tensors.Get(y, count), got_dx = tensors.Get(dx, count);
      for (int64_t n = 0; n < count; ++n) {
        ASSERT_NEAR(got[n], expected.y[n], bound * (1 + std::abs(expected.y[n]))) << n;
        ASSERT_NEAR(got_dx[n], expected.dx[n], bound * (1 + std::abs(expected.dx[n]))) << n;
      }
      // A sum before it and dropout behind it; backward, dropout and what it is added to.
      std::vector<Numbers> forward, backward;
      for (bool joined : {false, true}) {
        const Tensor sum = room(), normed = room(), out = room();
        norm.x = sum;
        const void* unread[] = {normed.data};
        if (joined) device.BeginSegment(unread);
        device.Combine(Combination::kSum, dy, 1, y, sum, false, count);
        device.Norm(norm, normed, kNormVectors);
        device.Drop(drop, normed, out, false, kNormVectors, width);
        if (joined) device.EndSegment();
        forward.push_back(tensors.Get(sum, count));
        forward.push_back(tensors.Get(out, count));
        const Tensor dropped = room(), added = tensors.Put(in.x, element), last = room();
        if (joined) device.BeginSegment({});
        device.Drop(drop, dy, dropped, false, kNormVectors, width);
        device.NormBackward(norm, dropped, added, true,
                            static_cast<NormStatistics*>(statistics.data), kNormVectors);
        device.Combine(Combination::kScaled, added, 3, added, last, false, count);
        if (joined) device.EndSegment();
        for (const Tensor& tensor : {dropped, added, last}) {
          backward.push_back(tensors.Get(tensor, count));
        }
      }
      for (size_t n = 0; n < 2; ++n) EXPECT_TRUE(SameBits(forward[n], forward[n + 2])) << n;
      for (size_t n = 0; n < 3; ++n) EXPECT_TRUE(SameBits(backward[n], backward[n + 3])) << n;
    }
  }
}

}  // namespace

std::vector<double> NumbersOfProducts(cuda::CudaBackend& engine, ElementType element) {
  Random random(6);
  const Rounder round(Rounding::kElements);
  Numbers all;
  const auto append = [&](const Numbers& numbers) {
    all.insert(all.end(), numbers.begin(), numbers.end());
  };
  for (const Case& c : kCases) {
    const Drawn drawn(random, c, element);
    for (bool is_transposed : {true, false}) {
      append(Product(engine, element)
                 .OfWeights(drawn.a, drawn.b, c, is_transposed, drawn.old, drawn.bias));
    }
  }
  for (const auto& [rows, a_columns, b_columns] : kGradientCases) {
    const Numbers old = RandomNumbers(random, a_columns * b_columns, round, ElementType::kFloat32);
    const Matrix x = RandomMatrix(random, rows, a_columns, element);
    append(Product(engine, element)
               .OfRows(x, RandomMatrix(random, rows, b_columns, element), old, rows));
  }
  return all;
}

}  // namespace attnd
