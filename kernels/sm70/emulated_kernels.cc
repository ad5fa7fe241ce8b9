#include "kernels/sm70/emulated_kernels.h"

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

template <int kHeadDim, int kBlocks>
EmulatedKernel Forward(const KernelRow& row) {
  static constexpr Tile kTile = {128, 32, kHeadDim, kBlocks};
  using Math = Float32Accumulate;
  if (row.general) {
    return row.dropout ? Entry<ForwardKernel<Math, kTile, GeneralScores, PhiloxDropout>>()
                       : Entry<ForwardKernel<Math, kTile, GeneralScores, NoDropout>>();
  }
  return row.dropout ? Entry<ForwardKernel<Math, kTile, LinearScores, PhiloxDropout>>()
                     : Entry<ForwardKernel<Math, kTile, LinearScores, NoDropout>>();
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  if (row.kind != KernelKind::kForward || row.half_accumulate) return {};
  if (row.head_dim == 64) return Forward<64, 2>(row);
  if (row.head_dim == 128) return Forward<128, 1>(row);
  return {};
}

}  // namespace attnd::sm70
