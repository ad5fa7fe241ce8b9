// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/sm80/entry.cuh"
#include "kernels/sm90/kernels.h"

namespace attnd::sm90 {

// Whether a kernel itself waits for what the launch before writes, while that launch runs.
template <class Kernel>
constexpr bool StartsAhead() {
  if constexpr (requires { Kernel::kStartsAhead; }) return Kernel::kStartsAhead;
  return false;
}

template <class Kernel, int kBlocksPerSm>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm)
    Entry(const __grid_constant__ LaunchParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  sm80::PrefetchDescriptor(params);
  if constexpr (!StartsAhead<Kernel>()) ptx::WaitForLaunchBefore();
  Kernel::Run(params,
              ThreadIndex{static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
                          static_cast<int>(gridDim.x)},
              *reinterpret_cast<typename Kernel::Shared*>(shared));
  // Sooner, blocks of the next launch would crowd on the multiprocessors that are free first.
  if (threadIdx.x == Kernel::kThreads - 1) ptx::LaunchNext();
}

}  // namespace attnd::sm90
