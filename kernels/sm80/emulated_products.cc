#include "kernels/sm80/emulated_kernels.h"
#include "kernels/sm80/product.h"

namespace attnd::sm80 {
namespace {

template <class Math>
EmulatedKernel Find(KernelKind kind) {
  switch (kind) {
    case KernelKind::kProductRowsRows:
      return EmulatedEntry<ProductKernel<Math, false, false>>();
    case KernelKind::kProductRowsDepth:
      return EmulatedEntry<ProductKernel<Math, false, true>>();
    case KernelKind::kProductDepthDepth:
      return EmulatedEntry<ProductKernel<Math, true, true>>();
    default:
      return {};
  }
}

}  // namespace

EmulatedKernel FindEmulatedProduct(const KernelRow& row) {
  return row.element == ElementType::kBFloat16 ? Find<BFloat16Math>(row.kind)
                                               : Find<HalfMath>(row.kind);
}

}  // namespace attnd::sm80
