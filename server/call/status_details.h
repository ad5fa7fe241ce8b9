// From absl::Status to what goes over the wire: every non-OK status carries google.rpc.Status in
// grpc-status-details-bin with one ErrorInfo (reason, domain "attnd", metadata) and, where they
// apply, BadRequest, RetryInfo, QuotaFailure and PreconditionFailure. error_reasons.h lists the
// reasons. Inside the daemon the details travel as payloads of absl::Status. Any thread.
#pragma once

#include <grpcpp/support/status.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/attnd/v1/error_reasons.h"

namespace attnd {

inline constexpr absl::string_view kErrorDomain = "attnd";

using Metadata = std::initializer_list<std::pair<absl::string_view, absl::string_view>>;

// A status with its reason; metadata repeats every dynamic value of the message.
absl::Status Failure(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                     Metadata metadata = {});

// InvalidArgument "field: expected ..., got ...", the three in the metadata too.
absl::Status FieldError(absl::string_view reason, absl::string_view field,
                        absl::string_view expected, absl::string_view got);

// FAILED_PRECONDITION LEASE_LOST: `cause` says how the lease ended, "unknown" if that is forgotten.
absl::Status LeaseLost(absl::string_view cause);

// The same status about the field of another message: its text begins with `to` instead of `from`.
absl::Status RenameField(absl::Status status, absl::string_view from, absl::string_view to);

// Adds reason and metadata to a status whose message reads "field: expected ..., got ..." (those
// of Validate) or "field: ..." (those of Backend::Supports), chosen by code and field. One that has
// a reason already comes back as it was.
absl::Status Classified(absl::Status status);

// Tells the caller when to come back: RetryInfo and the trailer grpc-retry-pushback-ms.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

// The ErrorInfo's reason; empty when the status has none yet.
std::string ReasonOf(const absl::Status& status);

grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace attnd
