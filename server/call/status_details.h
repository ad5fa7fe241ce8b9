// From absl::Status to what goes over the wire: every non-OK status carries google.rpc.Status in
// grpc-status-details-bin with one ErrorInfo (reason, domain "attnd", metadata) and, where they
// apply, BadRequest, RetryInfo, QuotaFailure and PreconditionFailure. docs/ERRORS.md lists codes,
// reasons and cures. Inside the daemon the details travel as payloads of absl::Status. Any thread.
#pragma once

#include <grpcpp/support/status.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

inline constexpr absl::string_view kErrorDomain = "attnd";

namespace reason {
inline constexpr absl::string_view kBadField = "BAD_FIELD";
inline constexpr absl::string_view kBadShape = "BAD_SHAPE";
inline constexpr absl::string_view kBadDtype = "BAD_DTYPE";
inline constexpr absl::string_view kSizeMismatch = "SIZE_MISMATCH";
inline constexpr absl::string_view kUnknownField = "UNKNOWN_FIELD";
inline constexpr absl::string_view kMalformedMessage = "MALFORMED_MESSAGE";
inline constexpr absl::string_view kChunkOrder = "CHUNK_ORDER";
inline constexpr absl::string_view kMaskUnsupported = "MASK_UNSUPPORTED";
inline constexpr absl::string_view kMaskUnknown = "MASK_UNKNOWN";
inline constexpr absl::string_view kMaskTooComplex = "MASK_TOO_COMPLEX";
inline constexpr absl::string_view kMaskTooLarge = "MASK_TOO_LARGE";
inline constexpr absl::string_view kEmptyRow = "EMPTY_ROW";
inline constexpr absl::string_view kProblemUnsupported = "PROBLEM_UNSUPPORTED";
inline constexpr absl::string_view kTooLargeForDevice = "TOO_LARGE_FOR_DEVICE";
inline constexpr absl::string_view kReplyTooLarge = "REPLY_TOO_LARGE";
inline constexpr absl::string_view kQueueFull = "QUEUE_FULL";
inline constexpr absl::string_view kMemoryPressure = "MEMORY_PRESSURE";
inline constexpr absl::string_view kHbmPressure = "HBM_PRESSURE";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kDeviceLost = "DEVICE_LOST";
inline constexpr absl::string_view kTenantQuota = "TENANT_QUOTA";
inline constexpr absl::string_view kDeadlineUnmeetable = "DEADLINE_UNMEETABLE";
inline constexpr absl::string_view kDeadlineExceededQueue = "DEADLINE_EXCEEDED_IN_QUEUE";
inline constexpr absl::string_view kDeadlineExceededKernel = "DEADLINE_EXCEEDED_IN_KERNEL";
inline constexpr absl::string_view kDeadlineExceededTransfer = "DEADLINE_EXCEEDED_IN_TRANSFER";
inline constexpr absl::string_view kStreamIdle = "STREAM_IDLE";
inline constexpr absl::string_view kStreamTooSlow = "STREAM_TOO_SLOW";
inline constexpr absl::string_view kCancelled = "CANCELLED_BY_CALLER";
inline constexpr absl::string_view kTokenMissing = "TOKEN_MISSING";
inline constexpr absl::string_view kTokenInvalid = "TOKEN_INVALID";
inline constexpr absl::string_view kLeaseLost = "LEASE_LOST";
inline constexpr absl::string_view kEpochChanged = "EPOCH_CHANGED";
inline constexpr absl::string_view kWrongReplica = "WRONG_REPLICA";
inline constexpr absl::string_view kLeaseMismatch = "LEASE_MISMATCH";
inline constexpr absl::string_view kLeaseNotOwned = "LEASE_NOT_OWNED";
inline constexpr absl::string_view kCaptureLost = "CAPTURE_LOST";
inline constexpr absl::string_view kRegionUnknown = "REGION_UNKNOWN";
inline constexpr absl::string_view kEngineFailed = "ENGINE_FAILED";
inline constexpr absl::string_view kBadLayout = "BAD_LAYOUT";
inline constexpr absl::string_view kDigestMismatch = "DIGEST_MISMATCH";
inline constexpr absl::string_view kModuleTooLarge = "MODULE_TOO_LARGE";
inline constexpr absl::string_view kModuleUnsupported = "MODULE_UNSUPPORTED";
inline constexpr absl::string_view kModuleQuota = "MODULE_QUOTA";
inline constexpr absl::string_view kModuleExists = "MODULE_EXISTS";
inline constexpr absl::string_view kModuleTaken = "MODULE_TAKEN";
inline constexpr absl::string_view kModuleLost = "MODULE_LOST";
inline constexpr absl::string_view kModuleNotOwned = "MODULE_NOT_OWNED";
inline constexpr absl::string_view kWeightsIncomplete = "WEIGHTS_INCOMPLETE";
inline constexpr absl::string_view kSequenceMismatch = "SEQUENCE_MISMATCH";
inline constexpr absl::string_view kStepConflict = "STEP_CONFLICT";
inline constexpr absl::string_view kStepOutOfOrder = "STEP_OUT_OF_ORDER";
inline constexpr absl::string_view kGradientIncomplete = "GRADIENT_INCOMPLETE";
inline constexpr absl::string_view kMicroBatchConflict = "MICRO_BATCH_CONFLICT";
inline constexpr absl::string_view kMicroBatchEarly = "MICRO_BATCH_EARLY";
inline constexpr absl::string_view kStateUnavailable = "STATE_UNAVAILABLE";
inline constexpr absl::string_view kActivationPressure = "ACTIVATION_PRESSURE";
}  // namespace reason

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
