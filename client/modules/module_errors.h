// Classes a server's refusal of a module call by what RemoteModule does next.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd {

// The module that the token named is no more there: register it again.
bool IsModuleLost(const absl::Status& status);

// The activations that a Backward named are gone, or of weights that have changed.
bool AreActivationsLost(const absl::Status& status);

// An owner epoch above `epoch`; no two owners have the same.
uint64_t OwnerAfter(uint64_t epoch);

// The module's later owner, where the registration of an earlier one is refused.
std::optional<uint64_t> LaterOwner(const absl::Status& status);

// The token is of another server, which answers at the same address.
bool IsOfOtherServer(const absl::Status& status);

// The server has no room for another Forward's activations.
bool IsActivationPressure(const absl::Status& status);
// Returns what a caller is told once the call has been tried again in vain: RESOURCE_EXHAUSTED,
// since its own kept_rows are full. Any other status as it is.
absl::Status OfActivationPressure(absl::Status status);

// The server does not know the shared memory that a call named.
bool IsRegionUnknown(const absl::Status& status);

// Not all micro-batches that a call names have been added: others of a group are yet to come.
bool IsGradientBehind(const absl::Status& status);

// The call that ends `sequence` has been done: its reply was lost, and the server with it.
bool IsStepDone(const absl::Status& status, uint64_t sequence);

// FAILED_PRECONDITION NOT_STICKY: `name`'s calls reach several servers behind one address.
absl::Status NotSticky(absl::string_view name);

bool IsStateLost(const absl::Status& status);

// FAILED_PRECONDITION GRADIENT_INCOMPLETE: a micro-batch has failed, and was added or not.
absl::Status GradientsUnsure();

// FAILED_PRECONDITION STATE_LOST: the server has the state of `found`, and the log does not reach
// from there to `wanted`.
absl::Status StateLost(uint64_t found, uint64_t wanted);

}  // namespace attnd
