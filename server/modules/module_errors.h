// The statuses of module calls, each with its reason (docs/ERRORS.md). Any thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd {

// FAILED_PRECONDITION; `cause` is "released", "expired", "failed", "device_lost", "taken" or
// "unknown".
absl::Status ModuleLost(absl::string_view cause);
// A registration of owner `got`, where the module has a later one.
absl::Status ModuleTaken(absl::string_view name, uint64_t owner_epoch, uint64_t got);
absl::Status SequenceMismatch(uint64_t expected, uint64_t got);
absl::Status StepConflict(uint64_t sequence);
absl::Status StepOutOfOrder(uint64_t expected, uint64_t got);
// Micro-batches [0, held) are in the accumulator.
absl::Status GradientIncomplete(uint64_t held, uint64_t expected);
absl::Status MicroBatchConflict(uint64_t micro_batch);
absl::Status WeightsIncomplete(int64_t missing, absl::string_view first);
// UNAVAILABLE with RetryInfo.
absl::Status MicroBatchEarly(uint64_t micro_batch, uint64_t next);
absl::Status ActivationPressure(absl::string_view message);
absl::Status ModulesDraining();
// `why`: what the engine said of an exchange of gradients that has failed.
absl::Status SumFailed(absl::string_view why);

// The reasons of Register, chosen by code: of what checks a layout, and of what plans and makes an
// instance. One that has a reason already comes back as it was.
absl::Status OfLayout(absl::Status status);
absl::Status OfEngine(absl::Status status);
// LeaseTokens names the field residual_token and the reason LEASE_NOT_OWNED; of a module's token
// they are others.
absl::Status OfModuleToken(absl::Status status);

}  // namespace attnd
