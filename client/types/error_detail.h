// ErrorDetail: what a server says about an error beside its code and message (google.rpc.ErrorInfo
// and RetryInfo of grpc-status-details-bin). A Status from AttentionClient carries it as payloads;
// docs/CLIENT.md lists the reasons.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
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

// Whether the status carries one of these reasons.
bool HasReason(const absl::Status& status, std::initializer_list<absl::string_view> reasons);

// The status with the reason of an error that a client has found, or tells as a server would
// (proto/attnd/v1/error_reasons.h).
absl::Status WithReason(absl::Status status, absl::string_view reason,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace attnd
