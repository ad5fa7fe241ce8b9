#include "tests/emulator/sm70/emulated_kernels.h"

#include <type_traits>

#include "kernels/rules/capture_sums.h"
#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/merge_runs.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm70/backward.h"
#include "kernels/sm70/capture.h"
#include "kernels/sm70/forward.h"
#include "kernels/sm70/keep_rows.h"

namespace attnd::sm70 {
namespace {

template <class Rule, Tile kTile>
EmulatedKernel ForwardScoring(const KernelRow& row) {
  if (row.half_accumulate) {
    return EmulatedEntry<ForwardKernel<Float16Accumulate, kTile, Rule, NoDropout>>();
  }
  return row.dropout ? EmulatedEntry<ForwardKernel<Float32Accumulate, kTile, Rule, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<Float32Accumulate, kTile, Rule, NoDropout>>();
}

template <int kRows, int kHeadDim, int kBlocks>
EmulatedKernel Forward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, 32, kHeadDim, kBlocks};
  if (row.general) return ForwardScoring<GeneralScores, kTile>(row);
  return row.listed ? ForwardScoring<ListedScores, kTile>(row)
                    : ForwardScoring<LinearScores, kTile>(row);
}

template <int kHeadDim, int kBlocks>
EmulatedKernel SmallForward(const KernelRow& row) {
  static constexpr Tile kTile = {32, 32, kHeadDim, kBlocks};
  using Math = Float32Accumulate;
  return row.dropout ? EmulatedEntry<ForwardKernel<Math, kTile, ListedScores, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<Math, kTile, ListedScores, NoDropout>>();
}

template <int kHeadDim, int kBlocks>
EmulatedKernel SmallBackward(const KernelRow& row) {
  static constexpr Tile kTile = {32, 32, kHeadDim, kBlocks};
  return row.dropout
             ? EmulatedEntry<BackwardKernel<kTile, ListedScores, ReplayDropout, FixedPointSums>>()
             : EmulatedEntry<BackwardKernel<kTile, ListedScores, KeepAll, FixedPointSums>>();
}

// Those that have rows (kernels/tiles.cc).
template <class Rule, class DropoutPolicy, Tile kTile>
EmulatedKernel BackwardSumming(bool ordered) {
  if (ordered) return EmulatedEntry<BackwardKernel<kTile, Rule, DropoutPolicy, FixedPointSums>>();
  if constexpr (std::is_same_v<Rule, ListedScores>) {
    return {};
  } else {
    return EmulatedEntry<BackwardKernel<kTile, Rule, DropoutPolicy, FloatSums>>();
  }
}

template <class Rule, Tile kTile>
EmulatedKernel BackwardScoring(const KernelRow& row) {
  return row.dropout ? BackwardSumming<Rule, ReplayDropout, kTile>(row.ordered)
                     : BackwardSumming<Rule, KeepAll, kTile>(row.ordered);
}

template <int kHeadDim, int kRows, int kKeys>
EmulatedKernel Backward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, kKeys, kHeadDim, 1};
  if (row.general) return BackwardScoring<GeneralScores, kTile>(row);
  return row.listed ? BackwardScoring<ListedScores, kTile>(row)
                    : BackwardScoring<LinearScores, kTile>(row);
}

template <int kHeadDim, int kRows, int kKeys>
EmulatedKernel OfBackward(const KernelRow& row) {
  if (row.kind == KernelKind::kBackward) return Backward<kHeadDim, kRows, kKeys>(row);
  return row.ordered ? EmulatedEntry<DqKernel<kHeadDim, FixedPointSums>>()
                     : EmulatedEntry<DqKernel<kHeadDim, FloatSums>>();
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.element == ElementType::kFloat32) return FindEmulatedFloatKernel(row);
  if (row.kind == KernelKind::kKeyBounds) return EmulatedEntry<KeyBoundsKernel>();
  if (row.kind == KernelKind::kDelta) return EmulatedEntry<DeltaKernel>();
  if (row.kind == KernelKind::kMaskTiles) return EmulatedEntry<MaskTilesKernel>();
  if (row.kind == KernelKind::kMergeOutputs) return EmulatedEntry<MergeOutputsKernel<Float16>>();
  if (row.kind == KernelKind::kMergeKeyGradients) return EmulatedEntry<MergeKeyGradientsKernel>();
  if (row.kind == KernelKind::kSinkGradient) return EmulatedEntry<SinkGradientKernel>();
  if (row.kind == KernelKind::kBiasGradient) return EmulatedEntry<BiasGradientKernel<Float16>>();
  if (row.kind == KernelKind::kKeepRows) return EmulatedEntry<KeepRowsKernel>();
  if (row.kind == KernelKind::kCaptureSums) return EmulatedEntry<CaptureSumsKernel>();
  if (row.kind == KernelKind::kCaptureScores) {
    return EmulatedEntry<CaptureScoresKernel<CaptureProducts>>();
  }
  if (row.small && row.kind == KernelKind::kBackward) {
    return row.head_dim == 32   ? SmallBackward<32, 6>(row)
           : row.head_dim == 64 ? SmallBackward<64, 4>(row)
                                : SmallBackward<128, 2>(row);
  }
  if (row.small && row.kind == KernelKind::kForward) {
    return row.head_dim == 32   ? SmallForward<32, 8>(row)
           : row.head_dim == 64 ? SmallForward<64, 6>(row)
                                : SmallForward<128, 4>(row);
  }
  if (row.kind == KernelKind::kForward) {
    if (row.head_dim == 32) return Forward<128, 32, 2>(row);
    if (row.head_dim == 64) return Forward<128, 64, 2>(row);
    if (row.head_dim == 96) return Forward<128, 96, 1>(row);
    if (row.head_dim == 128) return Forward<128, 128, 1>(row);
    if (row.head_dim == 256) return Forward<64, 256, 1>(row);
    return {};
  }
  if (row.head_dim == 32) return OfBackward<32, 32, 128>(row);
  if (row.head_dim == 64) return OfBackward<64, 32, 128>(row);
  if (row.head_dim == 96) return OfBackward<96, 32, 64>(row);
  if (row.head_dim == 128) return OfBackward<128, 32, 64>(row);
  if (row.head_dim == 256) return OfBackward<256, 16, 32>(row);
  return {};
}

}  // namespace attnd::sm70
