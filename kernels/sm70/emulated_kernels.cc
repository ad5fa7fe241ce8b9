#include "kernels/sm70/emulated_kernels.h"

#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm70/backward.h"
#include "kernels/sm70/forward.h"
#include "kernels/sm70/keep_rows.h"

namespace attnd::sm70 {
namespace {

template <class Kernel>
void RunAt(const LaunchParams& params, const emulator::Place& at) {
  Kernel::Run(params, ThreadIndex{at.thread, static_cast<int>(at.block.x)},
              *reinterpret_cast<typename Kernel::Shared*>(at.shared));
}

template <class Kernel>
EmulatedKernel Entry() {
  return {&RunAt<Kernel>, Kernel::kThreads, sizeof(typename Kernel::Shared)};
}

template <int kRows, int kHeadDim, int kBlocks>
EmulatedKernel Forward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, 32, kHeadDim, kBlocks};
  if (row.half_accumulate) {
    return row.general ? Entry<ForwardKernel<Float16Accumulate, kTile, GeneralScores, NoDropout>>()
                       : Entry<ForwardKernel<Float16Accumulate, kTile, LinearScores, NoDropout>>();
  }
  using Math = Float32Accumulate;
  if (row.general) {
    return row.dropout ? Entry<ForwardKernel<Math, kTile, GeneralScores, PhiloxDropout>>()
                       : Entry<ForwardKernel<Math, kTile, GeneralScores, NoDropout>>();
  }
  return row.dropout ? Entry<ForwardKernel<Math, kTile, LinearScores, PhiloxDropout>>()
                     : Entry<ForwardKernel<Math, kTile, LinearScores, NoDropout>>();
}

template <class Rule, class Dropper, Tile kTile>
EmulatedKernel BackwardSumming(bool ordered) {
  return ordered ? Entry<BackwardKernel<kTile, Rule, Dropper, FixedPointSums>>()
                 : Entry<BackwardKernel<kTile, Rule, Dropper, FloatSums>>();
}

template <int kHeadDim, int kRows, int kKeys>
EmulatedKernel Backward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, kKeys, kHeadDim, 1};
  if (row.general) {
    return row.dropout ? BackwardSumming<GeneralScores, ReplayDropout, kTile>(row.ordered)
                       : BackwardSumming<GeneralScores, KeepAll, kTile>(row.ordered);
  }
  return row.dropout ? BackwardSumming<LinearScores, ReplayDropout, kTile>(row.ordered)
                     : BackwardSumming<LinearScores, KeepAll, kTile>(row.ordered);
}

template <int kHeadDim, int kRows, int kKeys>
EmulatedKernel OfBackward(const KernelRow& row) {
  if (row.kind == KernelKind::kBackward) return Backward<kHeadDim, kRows, kKeys>(row);
  return row.ordered ? Entry<DqKernel<kHeadDim, FixedPointSums>>()
                     : Entry<DqKernel<kHeadDim, FloatSums>>();
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.kind == KernelKind::kKeyBounds) return Entry<KeyBoundsKernel>();
  if (row.kind == KernelKind::kDelta) return Entry<DeltaKernel>();
  if (row.kind == KernelKind::kRowMaskTiles) return Entry<MaskTilesKernel<false>>();
  if (row.kind == KernelKind::kKeyMaskTiles) return Entry<MaskTilesKernel<true>>();
  if (row.kind == KernelKind::kSinkGradient) return Entry<SinkGradientKernel>();
  if (row.kind == KernelKind::kBiasGradient) return Entry<BiasGradientKernel>();
  if (row.kind == KernelKind::kKeepRows) return Entry<KeepRowsKernel>();
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
