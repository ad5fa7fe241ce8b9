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

}  // namespace attnd
