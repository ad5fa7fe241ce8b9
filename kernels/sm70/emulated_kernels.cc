#include "kernels/sm70/emulated_kernels.h"

#include "kernels/parameter_gradients.h"
#include "kernels/sm70/backward.h"
#include "kernels/sm70/forward.h"

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
EmulatedKernel BackwardInOrder(bool ordered) {
  return ordered ? Entry<BackwardKernel<kTile, Rule, Dropper, InKeyOrder>>()
                 : Entry<BackwardKernel<kTile, Rule, Dropper, AnyOrder>>();
}

template <int kHeadDim, int kKeys>
EmulatedKernel Backward(const KernelRow& row) {
  static constexpr Tile kTile = {32, kKeys, kHeadDim, 1};
  if (row.general) {
    return row.dropout ? BackwardInOrder<GeneralScores, ReplayDropout, kTile>(row.ordered)
                       : BackwardInOrder<GeneralScores, KeepAll, kTile>(row.ordered);
  }
  return row.dropout ? BackwardInOrder<LinearScores, ReplayDropout, kTile>(row.ordered)
                     : BackwardInOrder<LinearScores, KeepAll, kTile>(row.ordered);
}

template <int kHeadDim, int kKeys, int kForwardBlocks>
EmulatedKernel OfHeadDim(const KernelRow& row) {
  switch (row.kind) {
    case KernelKind::kForward:
      return Forward<128, kHeadDim, kForwardBlocks>(row);
    case KernelKind::kBackward:
      return Backward<kHeadDim, kKeys>(row);
    case KernelKind::kDelta:
      return Entry<DeltaKernel>();
    case KernelKind::kQueryGradient:
      return Entry<DqKernel<kHeadDim>>();
    case KernelKind::kSinkGradient:
    case KernelKind::kBiasGradient:
      break;
  }
  return {};
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.kind == KernelKind::kSinkGradient) return Entry<SinkGradientKernel>();
  if (row.kind == KernelKind::kBiasGradient) return Entry<BiasGradientKernel>();
  if (row.kind == KernelKind::kForward) {
    if (row.head_dim == 32) return Forward<128, 32, 2>(row);
    if (row.head_dim == 96) return Forward<128, 96, 1>(row);
    if (row.head_dim == 256) return Forward<64, 256, 1>(row);
  }
  if (row.head_dim == 64) return OfHeadDim<64, 128, 2>(row);
  if (row.head_dim == 128) return OfHeadDim<128, 64, 1>(row);
  return {};
}

}  // namespace attnd::sm70
