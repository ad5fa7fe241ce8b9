#include "kernels/layers/cuda/product_group.h"

#include <array>

#include "base/check.h"
#include "kernels/layers/cuda/dense_tensors.h"
#include "kernels/layers/cuda/product_choice.h"

namespace attnd {
namespace {

int64_t TilesOf(const LayerKernel& kernel, const ProductDesc& p) {
  const ProductTileSize size = TileSizeOf(kernel);
  return ProductTiles(p, size.rows, size.columns);
}

ByteRange RangeOf(const void* data, int64_t rows, int64_t stride, int64_t columns,
                  int32_t element) {
  if (data == nullptr || rows == 0 || columns == 0) return {};
  return ByteRange::At(data, ((rows - 1) * stride + columns) * CodeBytes(element));
}
ByteRange OperandOf(const void* data, int64_t stride, bool by_depth, int64_t size, int64_t depth,
                    int32_t element) {
  return by_depth ? RangeOf(data, depth, stride, size, element)
                  : RangeOf(data, size, stride, depth, element);
}
std::array<ByteRange, 3> ReadsOf(const PlainProductDesc& desc) {
  const ProductDesc& p = desc.product;
  return {OperandOf(p.a, p.a_stride, desc.a_by_depth != 0, p.rows, p.depth, desc.a_element),
          OperandOf(p.b, p.b_stride, desc.b_by_depth != 0, p.columns, p.depth, desc.b_element),
          RangeOf(p.bias, 1, 0, p.columns, p.bias_element)};
}

}  // namespace

ByteRange WrittenBy(const ProductDesc& p) {
  return RangeOf(p.c, p.rows, p.c_stride, p.columns, p.c_element);
}

bool ProductGroup::Takes(const LayerKernel& kernel, const Waiting& product) const {
  if (products_.empty()) return true;
  if (products_.size() == kMostLaunchedTogether) return false;
  const ProductDesc& p = product.desc.product;
  const ProductDesc& first = products_.front().desc.product;
  if (kernel.kind != kernel_.kind || kernel.element != kernel_.element || p.depth != first.depth) {
    return false;
  }
  if (flops_ + product.flops > GainOf(kernel) * kLaunchFlops) return false;
  if (p.result == kProductAddBlocks && tiles_ + TilesOf(kernel, p) > kMostGradientTiles) {
    return false;
  }
  return !touched_.Meet(ReadsOf(product.desc), {WrittenBy(p)});
}

void ProductGroup::Add(const LayerKernel& kernel, const Waiting& product) {
  DCHECK(Takes(kernel, product));
  kernel_ = kernel;
  products_.push_back(product);
  touched_.Add(ReadsOf(product.desc), {WrittenBy(product.desc.product)});
  flops_ += product.flops;
  tiles_ += TilesOf(kernel, product.desc.product);
}

bool ProductGroup::Join(const NumbersDesc& curve, bool is_unread) {
  if (products_.size() != 1 || kernel_.kind == KernelKind::kProductDepthDepth) return false;
  Waiting& waiting = products_.front();
  ProductDesc& p = waiting.desc.product;
  const bool is_slope = curve.rule.op == kNumbersSlope;
  if (!is_slope && curve.rule.op != kNumbersCurve) return false;
  const DenseTensor& of_c = is_slope ? curve.b : curve.a;
  const int64_t count = int64_t{p.rows} * p.columns;
  const int32_t element = cuda::BiasCode(kernel_.element);
  for (const DenseTensor& t : {curve.a, is_slope ? curve.b : curve.a, curve.out}) {
    if (t.element != element || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  if (of_c.data != p.c || p.result != kProductStore || p.c_element != element ||
      p.c_stride != p.columns || curve.rows != 1 || curve.columns != count || curve.add != 0 ||
      (is_slope && !is_unread)) {
    return false;
  }
  waiting.curve = {curve.rule.curve, is_slope ? nullptr : curve.out.data,
                   is_slope ? curve.a.data : nullptr};
  const auto range_of = [&](const DenseTensor& t) {
    return ByteRange::At(t.data, count * CodeBytes(element));
  };
  touched_.Add({range_of(curve.a)}, {range_of(curve.out)});
  if (is_slope) {
    p.c = curve.out.data;
  } else if (is_unread) {
    p.c = nullptr;
  }
  return true;
}

std::vector<ProductGroup::Waiting> ProductGroup::Take() {
  touched_.Clear();
  flops_ = 0;
  tiles_ = 0;
  return std::exchange(products_, {});
}

}  // namespace attnd
