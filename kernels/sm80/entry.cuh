// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/sm80/kernels.h"

namespace attnd::sm80 {

// Brings the descriptor of a launch, which the host has uploaded before the launches ahead of it,
// into the L2 while the last of these ends.
__device__ __forceinline__ void PrefetchDescriptor(const LaunchParams& params) {
  constexpr int kLines = 4, kLineBytes = 128;
  const auto* const desc = static_cast<const char*>(params.dense);
  if (desc != nullptr && threadIdx.x < kLines) {
    ptx::PrefetchLine(desc + kLineBytes * threadIdx.x);
  }
}

template <class Kernel, int kBlocksPerSm, bool kLaunchesOverlap>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm)
    Entry(const __grid_constant__ LaunchParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  if constexpr (kLaunchesOverlap) {
    PrefetchDescriptor(params);
    ptx::WaitForLaunchBefore();
  }
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
