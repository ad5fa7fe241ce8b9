// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/sm80/kernels.h"

namespace attnd::sm80 {

template <class Kernel, int kBlocksPerSm, bool kLaunchesOverlap>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm)
    Entry(const __grid_constant__ LaunchParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  if constexpr (kLaunchesOverlap) ptx::WaitForLaunchBefore();
  Kernel::Run(params,
              ThreadIndex{static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
                          static_cast<int>(gridDim.x)},
              *reinterpret_cast<typename Kernel::Shared*>(shared));
  // Sooner, blocks of the next launch would crowd on the multiprocessors that are free first.
  if constexpr (kLaunchesOverlap) {
    if (threadIdx.x == Kernel::kThreads - 1) ptx::LaunchNext();
  }
}

}  // namespace attnd::sm80
