#include "tests/emulator/sm80/emulated_kernels.h"
#include "kernels/sm80/float_math.h"
#include "kernels/sm80/product.h"

namespace attnd::sm80 {
namespace {

template <class Math, int kTile>
EmulatedKernel OfTile(KernelKind kind) {
  switch (kind) {
    case KernelKind::kProductRowsRows:
      return EmulatedEntry<ProductKernel<Math, kTile, false, false>>();
    case KernelKind::kProductRowsDepth:
      return EmulatedEntry<ProductKernel<Math, kTile, false, true>>();
    case KernelKind::kProductDepthDepth:
      return EmulatedEntry<ProductKernel<Math, kTile, true, true>>();
    default:
      return {};
  }
}
template <class Math>
EmulatedKernel Find(const KernelRow& row) {
  return row.small ? OfTile<Math, kSmallProductTile>(row.kind)
                   : OfTile<Math, kProductTile>(row.kind);
}

}  // namespace

EmulatedKernel FindEmulatedProduct(const KernelRow& row) {
  switch (row.element) {
    case ElementType::kFloat16:
      return Find<HalfMath>(row);
    case ElementType::kBFloat16:
      return Find<BFloat16Math>(row);
    case ElementType::kFloat32:
      return Find<FloatMath>(row);
  }
  return {};
}

}  // namespace attnd::sm80
