#include "tests/emulator/sm70/emulated_kernels.h"
#include "kernels/sm70/product.h"

namespace attnd::sm70 {

EmulatedKernel FindEmulatedProduct(const KernelRow& row) {
  switch (row.kind) {
    case KernelKind::kProductRowsRows:
      return EmulatedEntry<ProductKernel<false, false>>();
    case KernelKind::kProductRowsDepth:
      return EmulatedEntry<ProductKernel<false, true>>();
    case KernelKind::kProductDepthDepth:
      return EmulatedEntry<ProductKernel<true, true>>();
    default:
      return {};
  }
}

}  // namespace attnd::sm70
