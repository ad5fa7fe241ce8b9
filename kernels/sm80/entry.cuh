// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/dense/kernels.h"
#include "kernels/rules/capture_sums.h"
#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/merge_runs.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm80/backward.h"
#include "kernels/sm80/capture.h"
#include "kernels/sm80/forward.h"
#include "kernels/sm80/product.h"

namespace attnd::sm80 {

template <class Kernel, int kBlocksPerSm>
__global__ void __launch_bounds__(Kernel::kThreads, kBlocksPerSm)
    Entry(const __grid_constant__ LaunchParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  Kernel::Run(params,
              ThreadIndex{static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
                          static_cast<int>(gridDim.x)},
              *reinterpret_cast<typename Kernel::Shared*>(shared));
}

}  // namespace attnd::sm80
