#include "tests/emulator/sm90/emulated_kernels.h"

#include "kernels/sm90/backward.h"
#include "kernels/sm90/dropout_bits.h"
#include "kernels/sm90/forward.h"
#include "kernels/sm90/query_gradient.h"

namespace attnd::sm90 {
namespace {

template <class Math, Tile kTile, class Rule>
EmulatedKernel ForwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<ForwardKernel<Math, kTile, Rule, AheadDropout>>()
                     : EmulatedEntry<ForwardKernel<Math, kTile, Rule, NoDropout>>();
}
template <class Math, Tile kTile>
EmulatedKernel Forward(const KernelRow& row) {
  if (row.general) return ForwardScoring<Math, kTile, GeneralScores>(row);
  return row.listed ? ForwardScoring<Math, kTile, ListedScores>(row)
                    : ForwardScoring<Math, kTile, LinearScores>(row);
}

template <class Math, Tile kTile, class Rule, class DqSums>
EmulatedKernel BackwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<BackwardKernel<Math, kTile, Rule, ReplayDropout, DqSums>>()
                     : EmulatedEntry<BackwardKernel<Math, kTile, Rule, KeepAll, DqSums>>();
}
// Those that have rows (kernels/tiles.cc).
template <class Math, Tile kTile>
EmulatedKernel Backward(const KernelRow& row) {
  if (!row.ordered) return BackwardScoring<Math, kTile, LinearScores, FloatSums>(row);
  return row.listed ? BackwardScoring<Math, kTile, ListedScores, FixedPointSums>(row)
                    : BackwardScoring<Math, kTile, LinearScores, FixedPointSums>(row);
}

template <class Math, int kHeadDim>
EmulatedKernel Gradient(const KernelRow& row) {
  return row.ordered ? EmulatedEntry<DqKernel<Math, kHeadDim, FixedPointSums>>()
                     : EmulatedEntry<DqKernel<Math, kHeadDim, FloatSums>>();
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.kind == KernelKind::kDropoutBits) return EmulatedEntry<DropoutBitsKernel>();
  // One head dimension of each form: each kernel costs the compiler seconds.
  static constexpr Tile kNarrow = {192, 128, 64, 1}, kWide = {128, 128, 128, 1};
  if (row.kind == KernelKind::kForwardDropoutBits) {
    return row.head_dim == 64 ? EmulatedEntry<ForwardDropoutBits<kNarrow.q_rows>>()
                              : EmulatedEntry<ForwardDropoutBits<kWide.q_rows>>();
  }
  const bool is_half = row.element == ElementType::kFloat16;
  static constexpr Tile kNarrowKeys = {64, 128, 64, 1}, kWideKeys = {64, 128, 128, 1};
  if (row.kind == KernelKind::kBackward) {
    if (is_half && row.head_dim == 64) return Backward<HalfMath, kNarrowKeys>(row);
    if (!is_half && row.head_dim == 128) return Backward<BFloat16Math, kWideKeys>(row);
    return {};
  }
  if (row.kind == KernelKind::kQueryGradient) {
    if (is_half && row.head_dim == 64) return Gradient<HalfMath, 64>(row);
    if (!is_half && row.head_dim == 128) return Gradient<BFloat16Math, 128>(row);
    return {};
  }
  if (is_half && row.head_dim == 64) return Forward<HalfMath, kNarrow>(row);
  if (!is_half && row.head_dim == 128) return Forward<BFloat16Math, kWide>(row);
  return {};
}

}  // namespace attnd::sm90
