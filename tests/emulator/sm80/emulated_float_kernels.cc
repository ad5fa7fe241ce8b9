// The kernels of float32: a file of its own, since each costs the compiler seconds.
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm80/backward.h"
#include "kernels/sm80/capture.h"
#include "tests/emulator/sm80/emulated_kernels.h"
#include "kernels/sm80/forward.h"

namespace attnd::sm80 {
namespace {

template <Tile kTile, class Rule>
EmulatedKernel ForwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<ForwardKernel<FloatMath, kTile, Rule, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<FloatMath, kTile, Rule, NoDropout>>();
}
template <Tile kTile, class Rule>
EmulatedKernel BackwardScoring(const KernelRow& row) {
  return row.dropout
             ? EmulatedEntry<
                   BackwardKernel<FloatMath, kTile, Rule, ReplayDropout, FixedPointSums>>()
             : EmulatedEntry<BackwardKernel<FloatMath, kTile, Rule, KeepAll, FixedPointSums>>();
}

template <Tile kTile, class Rule>
EmulatedKernel Scoring(const KernelRow& row) {
  if constexpr (kTile.q_rows == kDqBlockRows) {
    return BackwardScoring<kTile, Rule>(row);
  } else {
    return ForwardScoring<kTile, Rule>(row);
  }
}
template <Tile kTile>
EmulatedKernel OfTile(const KernelRow& row) {
  if (row.general) return Scoring<kTile, GeneralScores>(row);
  return row.listed ? Scoring<kTile, ListedScores>(row) : Scoring<kTile, LinearScores>(row);
}

template <int kHeadDim>
EmulatedKernel OfHeadDim(const KernelRow& row) {
  static constexpr Tile kForward = {128, kHeadDim > 64 ? 32 : 64, kHeadDim, 1};
  static constexpr Tile kBackward = {64, 64, kHeadDim, 1};
  if (row.kind == KernelKind::kForward) return OfTile<kForward>(row);
  if (row.kind == KernelKind::kBackward) return OfTile<kBackward>(row);
  return EmulatedEntry<DqKernel<FloatMath, kHeadDim, FixedPointSums>>();
}

}  // namespace

EmulatedKernel FindEmulatedFloatKernel(const KernelRow& row) {
  if (row.kind == KernelKind::kBiasGradient) return EmulatedEntry<BiasGradientKernel<FloatMath>>();
  if (row.kind == KernelKind::kKeyBounds) return EmulatedEntry<KeyBoundsKernel<FloatMath>>();
  if (row.kind == KernelKind::kDelta) return EmulatedEntry<DeltaKernel<FloatMath>>();
  if (row.kind == KernelKind::kCaptureScores) {
    return EmulatedEntry<CaptureScoresKernel<CaptureProducts<FloatMath>>>();
  }
  return row.head_dim == 64 ? OfHeadDim<64>(row) : OfHeadDim<128>(row);
}

}  // namespace attnd::sm80
