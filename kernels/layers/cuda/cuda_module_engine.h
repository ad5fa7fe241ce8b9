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
#include "kernels/layers/cuda/plan_cache.h"
#include "kernels/layers/cuda/plan_search.h"
#include "modules/module_engine.h"
#include "modules/segments/scheme.h"

namespace attnd {

// Cuts each block of a module.
using CutBlocks = std::function<std::vector<BlockEnds>(const ModuleGraph&, const ModuleLimits&)>;
CutBlocks CutsOnGpu(Fusion fusion, const BackendInfo& gpu);

struct CudaModuleOptions {
  HoldDeviceMemory hold = nullptr;               // null: asks nobody
  CutBlocks cut = nullptr;                       // null: by bounds; until it is measured
  std::shared_ptr<const Nccl> nccl = nullptr;    // null: replicas are not connected
  std::shared_ptr<PlanSearch> search = nullptr;  // null: nothing is measured
  SampleClock clock = nullptr;
  // ModuleDevice::PartBytes: with fewer, the kernels of a part do not fill a GPU.
  int64_t part_bytes = int64_t{8} << 20;
};
// The attention engine outlives this one.
std::unique_ptr<ModuleEngine> MakeCudaModuleEngine(cuda::CudaBackend& attention,
                                                   CudaModuleOptions options = {});

// Searches on this GPU. `cache` may be null.
std::shared_ptr<PlanSearch> SearchOnGpu(cuda::CudaBackend& attention,
                                        std::shared_ptr<PlanCache> cache);

// Both engines of one GPU. `nccl` and `plans`, which may be null, are shared by all GPUs.
Device GpuDeviceOf(std::unique_ptr<cuda::CudaBackend> attention, Fusion fusion = Fusion::kBound,
                   std::shared_ptr<const Nccl> nccl = nullptr,
                   std::shared_ptr<PlanCache> plans = nullptr);

}  // namespace attnd
