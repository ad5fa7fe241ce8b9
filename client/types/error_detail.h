// ErrorDetail: what a server says about an error beside its code and message (google.rpc.ErrorInfo
// and RetryInfo of grpc-status-details-bin). A Status from AttentionClient carries it as payloads;
// docs/CLIENT.md lists the reasons.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd {

struct ErrorDetail {
  std::string reason;                           // QUEUE_FULL, MASK_UNSUPPORTED, ...
  std::string domain;                           // "attnd"
  std::map<std::string, std::string> metadata;  // field, expected, got, limit, ...
  std::optional<absl::Duration> retry_delay;
};

// Nothing when the status carries no ErrorInfo.
std::optional<ErrorDetail> DetailOf(const absl::Status& status);

}  // namespace attnd
