// The engine of modules on one GPU, beside the engine that computes attention on it: float16 (from
// sm_80 on bfloat16 and float32 too) values with float32 arithmetic.
//
// Memory   what the plan says, of the GPU's, in one piece; packed weights, attention's own and
//          descriptors beside it.
// Results  see ModuleEngine. Steps give the bits of the other engines; the rest those of its
//          architecture.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/driver/nccl.h"
#include "kernels/device.h"
#include "modules/module_engine.h"
#include "modules/segments/scheme.h"

namespace attnd {

// Cuts each block of a module.
using CutBlocks = std::function<std::vector<BlockEnds>(const ModuleGraph&, const ModuleLimits&)>;
CutBlocks CutsOnGpu(Fusion fusion, const BackendInfo& gpu);

// The attention engine outlives this one. `hold` may be null; `cut` null: by bounds; `nccl` null:
// replicas are not connected.
std::unique_ptr<ModuleEngine> MakeCudaModuleEngine(cuda::CudaBackend& attention,
                                                   HoldDeviceMemory hold = nullptr,
                                                   CutBlocks cut = nullptr,
                                                   std::shared_ptr<const Nccl> nccl = nullptr);

// Both engines of one GPU. `nccl`, which may be null, is shared by all GPUs.
Device GpuDeviceOf(std::unique_ptr<cuda::CudaBackend> attention, Fusion fusion = Fusion::kBound,
                   std::shared_ptr<const Nccl> nccl = nullptr);

}  // namespace attnd
