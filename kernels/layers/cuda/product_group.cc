#include "kernels/layers/cuda/product_group.h"

#include <array>

#include "base/check.h"
#include "kernels/dense/listed_params.h"
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
std::array<ByteRange, 4> ReadsOf(const PlainProductDesc& desc) {
  const ProductDesc& p = desc.product;
  return {OperandOf(p.a, p.a_stride, desc.a_by_depth != 0, p.rows, p.depth, desc.a_element),
          OperandOf(p.b, p.b_stride, desc.b_by_depth != 0, p.columns, p.depth, desc.b_element),
          RangeOf(p.bias, 1, 0, p.columns, p.bias_element),
          RangeOf(p.curve.at, p.rows, p.c_stride, p.columns, p.c_element)};
}

}  // namespace

std::array<ByteRange, 2> WrittenBy(const ProductDesc& p) {
  const ByteRange c = RangeOf(p.c, p.rows, p.c_stride, p.columns, p.c_element);
  if (p.result == kProductAddBlocks) {
    return {c, RangeOf(ColumnSumsOf(p), 1, 0, p.rows, kBiasFloat32)};
  }
  return {c, RangeOf(p.curve.value, p.rows, p.c_stride, p.columns, p.c_element)};
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
  return !touched_.Meet(ReadsOf(product.desc), WrittenBy(p));
}

void ProductGroup::Add(const LayerKernel& kernel, const Waiting& product) {
  DCHECK(Takes(kernel, product));
  kernel_ = kernel;
  products_.push_back(product);
  touched_.Add(ReadsOf(product.desc), WrittenBy(product.desc.product));
  flops_ += product.flops;
  tiles_ += TilesOf(kernel, product.desc.product);
}

std::vector<ProductGroup::Waiting> ProductGroup::Take() {
  touched_.Clear();
  flops_ = 0;
  tiles_ = 0;
  return std::exchange(products_, {});
}

}  // namespace attnd
