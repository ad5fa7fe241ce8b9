// Classes a server's refusal, read from its ErrorInfo, by what the client does next.
#pragma once

#include "absl/status/status.h"

namespace attnd {

// The residual that the shard named is no more, or not this caller's.
bool IsResidualLost(const absl::Status& status);

// The server does not know the mask that was named.
bool IsMaskUnknown(const absl::Status& status);

// The caller's own quota on that server (TENANT_QUOTA).
bool IsOverQuota(const absl::Status& status);

// The server is about to stop, for good or to be started again (DRAINING).
bool IsDraining(const absl::Status& status);

// A server has ended the call (UnavailableIfCancelled).
bool IsCancelledByServer(const absl::Status& status);

// Whether a caller waits for it to pass until its deadline, and not a few times only: calls of its
// own that use its quota up, micro-batches of others that come first, and where it waits for
// servers (ClientOptions::wait_for_ready) one that stops.
bool IsWaitedFor(const absl::Status& status, bool wait_for_ready);

// A server that ends a call because it stops answers CANCELLED (gRPC 1.51 does so in the instant of
// a shutdown). Where `by_caller` is false this becomes UNAVAILABLE, with the server's details or
// CANCELLED_BY_SERVER; every other status stays.
absl::Status UnavailableIfCancelled(const absl::Status& status, bool by_caller);

}  // namespace attnd
