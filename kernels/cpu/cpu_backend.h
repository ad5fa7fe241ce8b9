// CpuBackend: attention on this machine's processors, for float32, float16 and bfloat16 and every
// option a valid Problem can hold. Vectors come from Google Highway, which picks the best
// instruction set at run time; arithmetic inside is float32.
//
// Threads   see backend.h; launches take turns on a pool of their own, `threads` wide, the caller
//           included; short ones run on their callers' threads, beside others.
// Memory    WorkspaceBytes is linear in the lengths; each thread adds a fixed scratch.
// Results   bitwise the same for any thread count, launch and shard by batch or KV-head group.
// Errors    Supports is OK for every Problem that Validate accepts; a launch does not fail.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"

namespace attnd {

struct CpuBackendOptions {
  int threads = 0;           // 0: AvailableCpus()
  int64_t memory_bytes = 0;  // reported by info(); 0: the machine's physical memory
};

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace attnd
