// Products whose curve, or the slope of one, is computed on their way out.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/layers/device_tensors.h"
#include "tests/layers/product_conformance.h"

namespace attnd {
namespace {

constexpr int kCurves = static_cast<int>(Curve::kTanh);

// A product [rows, columns] and a function of its numbers, which stand in memory before.
class CurvedProduct {
 public:
  CurvedProduct(DeviceTensors& tensors, const std::array<int64_t, 3>& sizes, ElementType element)
      : tensors_(tensors), count_(sizes[0] * sizes[1]) {
    const auto [rows, columns, depth] = sizes;
    Random random(static_cast<uint64_t>(columns));
    const auto draw = [&](int64_t count) {
      return tensors.Put(RandomNumbers(random, count, Rounder(Rounding::kElements), element),
                         element);
    };
    product_ = {.rows = rows,
                .a = draw(rows * depth),
                .weight = {.weight = draw(columns * depth),
                           .rows = depth,
                           .columns = columns,
                           .operand = element},
                .bias = draw(columns),
                .c = draw(count_)};
    at_ = draw(count_);
    out_ = draw(count_);
  }

  struct Results {
    Numbers c, out;
  };
  // curve(C) or C · the curve's slope: in one segment with the product, or behind it.
  Results Run(Curve curve, bool is_slope, bool is_segment, bool is_unread) {
    const std::vector<double> unwritten(count_, NAN);
    tensors_.Set(product_.c, unwritten);
    tensors_.Set(out_, unwritten);
    CudaDevice& device = tensors_.device();
    const void* const unread[] = {product_.c.data};
    if (is_segment) device.BeginSegment({unread, is_unread ? 1u : 0u});
    device.Multiply(product_);
    if (is_slope) {
      device.ApplyCurveSlope(curve, at_, product_.c, out_, false, count_);
    } else {
      device.ApplyCurve(curve, product_.c, out_, count_);
    }
    if (is_segment) device.EndSegment();
    return {tensors_.Get(product_.c, count_), tensors_.Get(out_, count_)};
  }

 private:
  DeviceTensors& tensors_;
  const int64_t count_;
  WeightProduct product_;
  Tensor at_, out_;
};

bool AreUnwritten(const Numbers& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isnan(x); });
}

TEST_P(ProductConformance, PassThroughACurveToTheSameBits) {
  const ElementType element = GetParam().element;
  const std::unique_ptr<cuda::CudaBackend> engine = GetParam().make();
  bool joins = false;
  // Whole tiles and cut ones, and numbers that are no whole chunks.
  for (const std::array<int64_t, 3>& sizes :
       {std::array<int64_t, 3>{256, 128, 64}, {130, 264, 40}, {9, 12, 16}}) {
    DeviceTensors tensors(*engine, 4 * sizes[0] * sizes[1]);
    CurvedProduct product(tensors, sizes, element);
    for (int n = 1; n <= kCurves; ++n) {
      const auto curve = static_cast<Curve>(n);
      SCOPED_TRACE(absl::StrCat(sizes[0], "x", sizes[1], " curve ", n));
      for (bool is_slope : {false, true}) {
        const CurvedProduct::Results apart = product.Run(curve, is_slope, false, false);
        const CurvedProduct::Results read = product.Run(curve, is_slope, true, false);
        const CurvedProduct::Results unread = product.Run(curve, is_slope, true, true);
        EXPECT_TRUE(SameBits(read.c, apart.c)) << is_slope;
        EXPECT_TRUE(SameBits(read.out, apart.out)) << is_slope;
        EXPECT_TRUE(SameBits(unread.out, apart.out)) << is_slope;
        joins = joins || AreUnwritten(unread.c);
      }
    }
  }
  // As products on tensor cores do.
  const bool is_volta = engine->info().architecture.rfind("sm_70", 0) == 0;
  EXPECT_EQ(joins, !is_volta || element == ElementType::kFloat16);
}

}  // namespace
}  // namespace attnd
