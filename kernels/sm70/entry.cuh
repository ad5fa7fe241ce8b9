// The only reader of threadIdx and blockIdx: a kernel of this folder as a __global__ function.
#pragma once

#include "kernels/dense/kernels.h"
#include "kernels/rules/capture_sums.h"
#include "kernels/rules/mask_tiles.h"
#include "kernels/rules/merge_runs.h"
#include "kernels/rules/parameter_gradients.h"
#include "kernels/sm70/backward.h"
#include "kernels/sm70/capture.h"
#include "kernels/sm70/forward.h"
#include "kernels/sm70/keep_rows.h"
#include "kernels/sm70/product.h"
#include "kernels/sm70/split_backward.h"

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
