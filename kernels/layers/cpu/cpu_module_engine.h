// The engine of modules on this machine's processors: float32, float16 and bfloat16 values with
// float32 arithmetic, products of its own (kernels/cpu/dense), attention by a Backend.
//
// Threads  its own, in the background (ThreadPool): who asks the daemon for attention waits less.
// Memory   what the plan says, and panels, gathered heads and attention's own beside it.
// Results  see ModuleEngine; bitwise the same for any number of threads.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/device.h"
#include "modules/module_engine.h"

namespace attnd {

// `threads` 0: AvailableCpus(). The attention engine computes in host memory (the CPU engine, the
// reference) and outlives this one.
std::unique_ptr<ModuleEngine> MakeCpuModuleEngine(int threads, Backend& attention);

// Both engines of the host's processors. That of modules has an attention engine of its own, in the
// background too.
Device CpuDeviceOf(const CpuBackendOptions& options);

}  // namespace attnd
