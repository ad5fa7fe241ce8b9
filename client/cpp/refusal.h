// What a server's refusal means for what the client does next, read from its ErrorInfo.
#pragma once

#include "absl/status/status.h"

namespace attnd {

enum class ResidualLoss { kNone, kLost, kNotKnown };

// kLost: the residual that the shard named is no more, or not this caller's; kNotKnown: the server
// keeps none at all.
ResidualLoss ResidualLossOf(const absl::Status& status);

// The caller's own quota on that server (TENANT_QUOTA).
bool IsOverQuota(const absl::Status& status);

}  // namespace attnd
