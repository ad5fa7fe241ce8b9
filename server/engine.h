// MakeEngine: the engine that --backend names.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace attnd {

// `name` is auto, cpu, cuda or reference. UNAVAILABLE when this machine or build has no such
// engine.
absl::StatusOr<std::unique_ptr<Backend>> MakeEngine(const std::string& name, int cpu_threads,
                                                    int64_t memory_bytes);

}  // namespace attnd
