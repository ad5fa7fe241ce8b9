// The engine of modules on one GPU, beside the engine that computes attention on it: float16 (from
// sm_80 on bfloat16 and float32 too) values with float32 arithmetic.
//
// Memory   what the plan says, of the GPU's, in one piece; packed weights, attention's own and
//          descriptors beside it.
// Results  see ModuleEngine. Steps give the bits of the other engines; the rest those of its
//          architecture.
#pragma once

#include <memory>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/device.h"
#include "modules/module_engine.h"

namespace attnd {

// The attention engine outlives this one. `hold` may be null.
std::unique_ptr<ModuleEngine> MakeCudaModuleEngine(cuda::CudaBackend& attention,
                                                   HoldDeviceMemory hold = nullptr);

// Both engines of one GPU.
Device GpuDeviceOf(std::unique_ptr<cuda::CudaBackend> attention);

}  // namespace attnd
