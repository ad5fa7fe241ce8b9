// ResidentMemory: what the process holds of the machine's memory, by its holders. The kinds add up
// to what the system says of the process. Any thread.
#pragma once

#include <cstddef>

#include "absl/types/span.h"
#include "server/metrics/sampled_metrics.h"

namespace attnd {

// The gauge attnd_resident_bytes with its label `kind`:
//   staging  pages of `staging`, StagingPool's memory, which outlives the metrics
//   tensors  LargeBuffers: modules, and copies of tensors and states
//   heap     what malloc has given out
//   program  code and other files
//   shared   memory that callers of this host share
//   other    the rest: memory that malloc keeps for later use, stacks, drivers
void AddResidentBytes(absl::Span<std::byte> staging, SampledMetrics& metrics);

}  // namespace attnd
