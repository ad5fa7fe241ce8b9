#include "modules/cuda/product_conformance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "modules/cpu/engine_fixture.h"
#include "modules/cuda/cuda_device.h"

namespace attnd {
namespace {

// Tensors in the memory of one device, one behind the other.
class DeviceTensors {
 public:
  explicit DeviceTensors(cuda::CudaBackend& engine) : device_(engine) {
    constexpr int64_t kBytes = int64_t{16} << 20;
    next_ = Value(device_.Allocate(kBytes + RoundUp(device_.OwnBytes(), kTensorAlignment)));
  }
  CudaDevice& device() { return device_; }
  Tensor Put(const Numbers& numbers, ElementType element) {
    const Tensor tensor{next_, element};
    const Bytes bytes = BytesOf(numbers, element);
    CheckOk(device_.Put(element, bytes.data(), tensor, static_cast<int64_t>(numbers.size())));
    next_ += RoundUp(static_cast<int64_t>(bytes.size()), kTensorAlignment);
    return tensor;
  }
  Numbers Get(const Tensor& tensor, int64_t count) {
    Bytes bytes(count * ElementBytes(tensor.element));
    CheckOk(device_.Get(tensor, tensor.element, bytes.data(), count));
    return NumbersOf(bytes, tensor.element);
  }

 private:
  CudaDevice device_;
  std::byte* next_;
};

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
// products; each rounding to the element half a unit.
void ExpectProduct(const Numbers& c, const Matrix& a, const Matrix& b, const Numbers& old,
                   const Numbers& bias, ElementType element) {
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
    DeviceTensors tensors(engine_);
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

  // Of gradients, in calls of `part` rows.
  Numbers OfRows(const Matrix& x, const Matrix& dy, const Numbers& old, int64_t part) {
    DeviceTensors tensors(engine_);
    const Tensor sums = tensors.Put(old, ElementType::kFloat32);
    const Tensor a = tensors.Put(x.numbers, element_), b = tensors.Put(dy.numbers, element_);
    for (int64_t first = 0; first < x.rows; first += part) {
      tensors.device().AddGradient({.rows = std::min(part, x.rows - first),
                                    .a = Behind(a, first * x.columns),
                                    .b = Behind(b, first * dy.columns),
                                    .a_columns = x.columns,
                                    .b_columns = dy.columns,
                                    .operand = element_,
                                    .sums = static_cast<float*>(sums.data)});
    }
    return tensors.Get(sums, x.columns * dy.columns);
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
    // Of no whole chunks.
    {.rows = 9, .columns = 12, .depth = 16},
    {.rows = 9, .columns = 16, .depth = 13, .add = true}};

TEST_P(ProductConformance, AreSumsOfProducts) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(1);
  const Rounder round(Rounding::kElements);
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.Name());
    const ElementType to = c.c_is_float ? ElementType::kFloat32 : element;
    const Matrix a = RandomMatrix(random, c.rows, c.depth, element);
    const Matrix b = RandomMatrix(random, c.depth, c.columns, element);
    const Numbers bias = c.bias ? RandomNumbers(random, c.columns, round, element) : Numbers();
    const Numbers old = c.add ? RandomNumbers(random, c.rows * c.columns, round, to) : Numbers();
    for (bool is_transposed : {true, false}) {
      SCOPED_TRACE(is_transposed ? "transposed" : "as it lies");
      ExpectProduct(Product(*engine, element).OfWeights(a, b, c, is_transposed, old, bias), a, b,
                    old, bias, to);
    }
  }
}

TEST_P(ProductConformance, GradientsAreSumsOverRows) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  Random random(2);
  for (const auto& [rows, a_columns, b_columns] :
       {std::array<int64_t, 3>{1, 8, 16}, {37, 136, 24}, {1100, 16, 136}, {40, 12, 20}}) {
    SCOPED_TRACE(absl::StrCat(rows, "x", a_columns, "x", b_columns));
    const Matrix x = RandomMatrix(random, rows, a_columns, element);
    const Matrix dy = RandomMatrix(random, rows, b_columns, element);
    const Numbers old = RandomNumbers(random, a_columns * b_columns, Rounder(Rounding::kElements),
                                      ElementType::kFloat32);
    const Numbers whole = Product(*engine, element).OfRows(x, dy, old, rows);
    ExpectProduct(whole, Transposed(x), dy, old, {}, ElementType::kFloat32);
    EXPECT_TRUE(SameBits(whole, Product(*engine, element).OfRows(x, dy, old, 1024)));
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

}  // namespace
}  // namespace attnd
