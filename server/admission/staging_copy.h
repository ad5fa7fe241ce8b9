// Staging copy: copies received bytes once, from gRPC's slices to their aligned place in staging
// memory, as soon as the call is admitted. It runs on the thread that received the bytes, while
// they are in its cache. Any thread, one at a time for each call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"

namespace attnd {

// One piece of staging memory; leases are evicted where free memory lies in pieces (`leases` may
// be null). UNAVAILABLE when no gap is large enough even so.
absl::StatusOr<StagingBlock> TakeBlock(int64_t bytes, StagingPool& staging,
                                       MemoryReclaimer* leases);

// Takes memory for the call's inputs, workspace and outputs and sets the place of each tensor.
// Those in a lease or in shared memory have a place already. Admission has reserved the sum.
// TakeBlock's error.
absl::Status TakePlaces(AdmittedCall& call, StagingPool& staging,
                        MemoryReclaimer* leases = nullptr);

// Copies the payloads of a call to their places and frees the received message. Returns the bytes
// copied.
int64_t Land(AdmittedCall& call);

// Copies the outputs that lie in shared memory, but not in place, there. Returns the bytes copied.
int64_t LandOutputs(const AdmittedCall& call);

// Copies one piece. A call whose inputs (`call_bytes`) exceed a core's cache is copied past the
// caches.
void LandPiece(std::byte* to, absl::Span<const uint8_t> from, int64_t call_bytes);

}  // namespace attnd
