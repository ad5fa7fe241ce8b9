// Registry: from a name on the command line to engines, of attention and of modules.
//
//   reference   float64 on one core, the oracle
//   cpu         this machine's processors
//   cuda        one NVIDIA GPU of compute capability 7.0 or newer: fast where the kernel table has
//               rows for it (V100), correct and slow elsewhere
//   auto        cuda on a usable GPU with rows of its own, else cpu; `note` says why
//
// With several GPUs there is a Device for each.
// Errors: INVALID_ARGUMENT for a name that is not in the list; FAILED_PRECONDITION, one line that
// says what is missing, where the engine cannot run here. Called at start-up, by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/mask_plans.h"
#include "kernels/backend.h"
#include "kernels/device.h"
#include "modules/segments/scheme.h"

namespace attnd {

struct BackendOptions {
  int cpu_threads = 0;  // 0: every CPU that this process may use
  // Ordinals of GPUs, as CUDA_VISIBLE_DEVICES leaves them; empty: all of them.
  std::vector<int> devices;
  double memory_fraction = 0.9;     // of a GPU's free memory
  double max_slice_seconds = 0.05;  // of one kernel on a GPU
  // Where kernels compiled at run time are kept; empty: $XDG_CACHE_HOME/attnd or ~/.cache/attnd.
  std::string kernel_cache;
  Fusion fusion = Fusion::kBound;  // of GPUs' module engines
  std::string nccl_library;        // connects GPUs of several processes; empty: none does
  // Compiled masks, shared with who else asks for them; null: each engine's own.
  std::shared_ptr<MaskPlans> mask_plans;
};

// At least one. `note`, if given, receives one line for the log when "auto" falls back or NCCL is
// missing, else stays empty.
absl::StatusOr<std::vector<Device>> MakeDevices(absl::string_view name,
                                                const BackendOptions& options, std::string* note);
// Attention of the first of them, for tools that use one; without devices in the options, GPU 0.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(absl::string_view name,
                                                     const BackendOptions& options,
                                                     std::string* note = nullptr);

}  // namespace attnd
