// CpuBackend: attention on this machine's processors, for float32, float16 and bfloat16 and every
// option a valid Problem can hold. Vectors come from Google Highway, which picks the best
// instruction set at run time; arithmetic inside is float32.
//
// Threads   see backend.h; launches take turns on a pool of their own, `threads` wide, the caller
//           included, and pass it on every few ms; short ones run on their callers' threads,
//           beside others.
// Memory    WorkspaceBytes is linear in the lengths; each thread adds a fixed scratch.
// Results   bitwise the same for any thread count, launch and shard by batch or KV-head group.
//           Masks by description go as MaskChoice says, alike wherever a call runs.
// Errors    Supports is OK for every Problem that Validate accepts, except a mask that takes too
//           long to compile (OUT_OF_RANGE); a launch does not fail.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "attention/mask_plans.h"
#include "base/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/mask_choice.h"

namespace attnd {

struct CpuBackendOptions {
  int threads = 0;           // 0: AvailableCpus()
  int64_t memory_bytes = 0;  // reported by info(); 0: the machine's physical memory
  ThreadPool::Priority priority = ThreadPool::Priority::kCallers;  // of the launches' threads
  // Compiled masks, shared with who else asks for plans of its tiles; null: its own.
  std::shared_ptr<MaskPlans> mask_plans;
  // For tests: masks by description go this way or are UNIMPLEMENTED.
  std::optional<CpuMaskKernel> mask_kernel;
};

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace attnd
