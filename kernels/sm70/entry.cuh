// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/sm70/kernels.h"

namespace attnd::sm70 {

template <class Kernel, int kBlocksPerSm>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm)
    Entry(const __grid_constant__ LaunchParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  Kernel::Run(params,
              ThreadIndex{static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
                          static_cast<int>(gridDim.x)},
              *reinterpret_cast<typename Kernel::Shared*>(shared));
}

}  // namespace attnd::sm70
