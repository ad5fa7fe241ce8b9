// The kernels of float32: a file of its own, since each costs the compiler seconds.
#include "kernels/rules/parameter_gradients.h"
#include "tests/emulator/sm70/emulated_kernels.h"
#include "kernels/sm70/forward.h"
#include "kernels/sm70/split_backward.h"

namespace attnd::sm70 {
namespace {

template <Tile kTile, class Rule>
EmulatedKernel ForwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<ForwardKernel<SplitAccumulate, kTile, Rule, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<SplitAccumulate, kTile, Rule, NoDropout>>();
}
template <int kRows, int kHeadDim>
EmulatedKernel Forward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, 32, kHeadDim, 1};
  if (row.general) return ForwardScoring<kTile, GeneralScores>(row);
  return row.listed ? ForwardScoring<kTile, ListedScores>(row)
                    : ForwardScoring<kTile, LinearScores>(row);
}

template <Tile kTile, class Rule>
EmulatedKernel BackwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<SplitBackwardKernel<kTile, Rule, ReplayDropout>>()
                     : EmulatedEntry<SplitBackwardKernel<kTile, Rule, KeepAll>>();
}
template <int kKeys, int kHeadDim>
EmulatedKernel Backward(const KernelRow& row) {
  static constexpr Tile kTile = {32, kKeys, kHeadDim, 1};
  if (row.general) return BackwardScoring<kTile, GeneralScores>(row);
  return row.listed ? BackwardScoring<kTile, ListedScores>(row)
                    : BackwardScoring<kTile, LinearScores>(row);
}

}  // namespace

EmulatedKernel FindEmulatedFloatKernel(const KernelRow& row) {
  const bool is_wide = row.head_dim > 64;
  switch (row.kind) {
    case KernelKind::kForward:
      return is_wide ? Forward<64, 128>(row) : Forward<128, 64>(row);
    case KernelKind::kBackward:
      return is_wide ? Backward<32, 128>(row) : Backward<64, 64>(row);
    case KernelKind::kQueryGradient:
      return is_wide ? EmulatedEntry<SplitDqKernel<128>>() : EmulatedEntry<SplitDqKernel<64>>();
    case KernelKind::kKeyBounds:
      return EmulatedEntry<attnd::KeyBoundsKernel<SplitFloat32>>();
    case KernelKind::kDelta:
      return EmulatedEntry<attnd::DeltaKernel<SplitFloat32, SplitP>>();
    case KernelKind::kBiasGradient:
      return EmulatedEntry<BiasGradientKernel<SplitFloat32>>();
    default:
      return {};
  }
}

}  // namespace attnd::sm70
