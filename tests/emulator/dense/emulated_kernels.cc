#include "tests/emulator/dense/emulated_kernels.h"

#include "kernels/dense/kernels.h"

namespace attnd {

EmulatedKernel FindEmulatedDenseKernel(const KernelRow& row) {
  switch (row.kind) {
    case KernelKind::kDenseNumbers:
      return EmulatedEntry<NumbersKernel>();
    case KernelKind::kDenseNorm:
      return EmulatedEntry<NormKernel>();
    case KernelKind::kDenseColumnSums:
      return EmulatedEntry<ColumnSumsKernel>();
    case KernelKind::kDenseRotary:
      return EmulatedEntry<RotaryKernel>();
    case KernelKind::kDenseSquares:
      return EmulatedEntry<SquaresKernel>();
    case KernelKind::kDenseStep:
      return EmulatedEntry<StepKernel>();
    case KernelKind::kDenseProduct:
      return EmulatedEntry<PlainProductKernel>();
    default:
      return {};
  }
}

}  // namespace attnd
