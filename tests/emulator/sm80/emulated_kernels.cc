#include "tests/emulator/sm80/emulated_kernels.h"

#include <type_traits>

#include "kernels/rules/capture_sums.h"
#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/merge_runs.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm80/backward.h"
#include "kernels/sm80/capture.h"
#include "kernels/sm80/forward.h"

namespace attnd::sm80 {
namespace {

template <class Math, Tile kTile, class Rule>
EmulatedKernel ForwardScoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<ForwardKernel<Math, kTile, Rule, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<Math, kTile, Rule, NoDropout>>();
}
template <class Math, Tile kTile>
EmulatedKernel Forward(const KernelRow& row) {
  if (row.general) return ForwardScoring<Math, kTile, GeneralScores>(row);
  return row.listed ? ForwardScoring<Math, kTile, ListedScores>(row)
                    : ForwardScoring<Math, kTile, LinearScores>(row);
}

// Those that have rows (kernels/tiles.cc).
template <class Math, Tile kTile, class Rule, template <int> class DropoutPolicy>
EmulatedKernel BackwardSumming(bool ordered) {
  if (ordered) {
    return EmulatedEntry<BackwardKernel<Math, kTile, Rule, DropoutPolicy, FixedPointSums>>();
  }
  if constexpr (std::is_same_v<Rule, LinearScores>) {
    return EmulatedEntry<BackwardKernel<Math, kTile, Rule, DropoutPolicy, FloatSums>>();
  } else {
    return {};
  }
}
template <class Math, Tile kTile, class Rule>
EmulatedKernel BackwardScoring(const KernelRow& row) {
  return row.dropout ? BackwardSumming<Math, kTile, Rule, ReplayDropout>(row.ordered)
                     : BackwardSumming<Math, kTile, Rule, KeepAll>(row.ordered);
}
template <class Math, Tile kTile>
EmulatedKernel Backward(const KernelRow& row) {
  if (row.general) return BackwardScoring<Math, kTile, GeneralScores>(row);
  return row.listed ? BackwardScoring<Math, kTile, ListedScores>(row)
                    : BackwardScoring<Math, kTile, LinearScores>(row);
}

template <int kHeadDim, int kForwardBlocks, int kBackwardBlocks>
EmulatedKernel Small(const KernelRow& row) {
  static constexpr Tile kForward = {32, 32, kHeadDim, kForwardBlocks};
  static constexpr Tile kBackward = {32, 32, kHeadDim, kBackwardBlocks};
  return row.kind == KernelKind::kForward ? ForwardScoring<HalfMath, kForward, ListedScores>(row)
                                          : BackwardScoring<HalfMath, kBackward, ListedScores>(row);
}

template <class Math, int kHeadDim>
EmulatedKernel OfHeadDim(const KernelRow& row) {
  static constexpr bool kWide = kHeadDim > 128;
  static constexpr Tile kForward = {kWide ? 64 : 128, 64, kHeadDim, 1};
  static constexpr Tile kBackward = {64, kWide ? 64 : 128, kHeadDim, 1};
  if (row.kind == KernelKind::kForward) return Forward<Math, kForward>(row);
  if (row.kind == KernelKind::kBackward) return Backward<Math, kBackward>(row);
  return row.ordered ? EmulatedEntry<DqKernel<Math, kHeadDim, FixedPointSums>>()
                     : EmulatedEntry<DqKernel<Math, kHeadDim, FloatSums>>();
}

template <class Math>
EmulatedKernel Find(const KernelRow& row) {
  if (row.kind == KernelKind::kBiasGradient) return EmulatedEntry<BiasGradientKernel<Math>>();
  if (row.kind == KernelKind::kKeyBounds) return EmulatedEntry<KeyBoundsKernel<Math>>();
  if (row.kind == KernelKind::kDelta) return EmulatedEntry<DeltaKernel<Math>>();
  if (row.kind == KernelKind::kMergeOutputs) return EmulatedEntry<MergeOutputsKernel<Math>>();
  if (row.kind == KernelKind::kCaptureScores) {
    return EmulatedEntry<CaptureScoresKernel<CaptureProducts<Math>>>();
  }
  // One head dimension of each form: each kernel costs the compiler seconds.
  if constexpr (std::is_same_v<Math, HalfMath>) {
    if (row.small) return row.head_dim == 64 ? Small<64, 12, 6>(row) : EmulatedKernel{};
    if (row.head_dim == 64) return OfHeadDim<Math, 64>(row);
  }
  if (row.head_dim == 256) return OfHeadDim<Math, 256>(row);
  return {};
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.kind == KernelKind::kMaskTiles) return EmulatedEntry<MaskTilesKernel>();
  if (row.kind == KernelKind::kMergeKeyGradients) return EmulatedEntry<MergeKeyGradientsKernel>();
  if (row.kind == KernelKind::kSinkGradient) return EmulatedEntry<SinkGradientKernel>();
  if (row.kind == KernelKind::kCaptureSums) return EmulatedEntry<CaptureSumsKernel>();
  if (row.element == ElementType::kFloat32) return FindEmulatedFloatKernel(row);
  return row.element == ElementType::kBFloat16 ? Find<BFloat16Math>(row) : Find<HalfMath>(row);
}

}  // namespace attnd::sm80
