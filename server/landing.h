// Landing: the one copy of a received byte, from gRPC's slices to its aligned place in staging
// memory. It runs on the thread that received the bytes, while they are in its cache, as soon as
// the call is admitted. Any thread, one at a time for each call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/admission.h"
#include "server/staging_pool.h"

namespace attnd {

// Takes memory for the call's inputs, workspace and outputs, and gives each its place there; what a
// lease holds for it, or lies in shared memory, has its place already. Admission has seen to the
// sum, but free memory may lie in pieces: then leases that lie between are evicted (`leases` may be
// null), and if no gap is large enough even so, it is UNAVAILABLE.
absl::Status TakePlaces(AdmittedCall& call, StagingPool& staging,
                        MemoryReclaimer* leases = nullptr);

// Copies the payloads of a call that has its places, and gives the received message back. Returns
// the bytes copied.
int64_t Land(AdmittedCall& call);

// One piece of that copy; `call_bytes` are those of all inputs, which lands past the caches when it
// is too large for them.
void LandPiece(std::byte* to, absl::Span<const uint8_t> from, int64_t call_bytes);

}  // namespace attnd
