// Who else uses a GPU is told what instances take of it. Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"

namespace attnd {

// Asked before an instance takes so many bytes of the GPU, and kept as long as it has them: what
// else uses the GPU does not count on them. UNAVAILABLE: not now.
using HoldGpuMemory = std::function<absl::StatusOr<std::shared_ptr<void>>(int64_t bytes)>;

}  // namespace attnd
