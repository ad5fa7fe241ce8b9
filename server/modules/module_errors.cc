#include "server/modules/module_errors.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

using absl::StatusCode;

constexpr absl::Duration kComeBack = absl::Milliseconds(100);
constexpr uint64_t kMissingNamed = 16;

// "2,3", of [held, expected).
std::string Missing(uint64_t held, uint64_t expected) {
  std::string text;
  const uint64_t end = std::min(expected, held + kMissingNamed);
  for (uint64_t n = held; n < end; ++n) absl::StrAppend(&text, n > held ? "," : "", n);
  if (end < expected) text += ",...";
  return text;
}

// Makes the status of a message "field: expected ..., got ...", or of "field: ..." where something
// is not offered.
absl::Status OfField(StatusCode code, absl::string_view reason, absl::string_view text) {
  const size_t colon = text.find(": ");
  const size_t expected = text.find(": expected ");
  const size_t got = text.rfind(", got ");
  const bool whole = expected != text.npos && got != text.npos && got > expected;
  return Failure(code, reason, text,
                 {{"field", text.substr(0, colon == text.npos ? 0 : colon)},
                  {"expected", whole ? text.substr(expected + 11, got - expected - 11) : ""},
                  {"got", whole ? text.substr(got + 6) : ""}});
}

}  // namespace

absl::Status ModuleLost(absl::string_view cause) {
  return Failure(StatusCode::kFailedPrecondition, reason::kModuleLost,
                 absl::StrCat("token: this module is gone (", cause, "); register it again"),
                 {{"cause", cause}});
}

absl::Status ModuleTaken(absl::string_view name, uint64_t owner_epoch, uint64_t got) {
  return Failure(
      StatusCode::kFailedPrecondition, reason::kModuleTaken,
      absl::StrCat("owner_epoch: the module ", name, " has been registered since by owner epoch ",
                   owner_epoch, ", got ", got, "; take another name, or register it anew"),
      {{"name", name}, {"epoch", absl::StrCat(owner_epoch)}, {"got", absl::StrCat(got)}});
}

absl::Status SequenceMismatch(uint64_t expected, uint64_t got) {
  return Failure(StatusCode::kFailedPrecondition, reason::kSequenceMismatch,
                 absl::StrCat("sequence: expected ", expected, ", got ", got),
                 {{"expected", absl::StrCat(expected)}, {"got", absl::StrCat(got)}});
}

absl::Status StepConflict(uint64_t sequence) {
  return Failure(StatusCode::kFailedPrecondition, reason::kStepConflict,
                 absl::StrCat("sequence: another call has made the next state of ", sequence,
                              "; let one process write a module"),
                 {{"sequence", absl::StrCat(sequence)}});
}

absl::Status StepOutOfOrder(uint64_t expected, uint64_t got) {
  return Failure(StatusCode::kFailedPrecondition, reason::kStepOutOfOrder,
                 absl::StrCat("sequence: expected ", expected, ", got ", got),
                 {{"expected", absl::StrCat(expected)}, {"got", absl::StrCat(got)}});
}

absl::Status GradientIncomplete(uint64_t held, uint64_t expected) {
  const std::string missing = Missing(held, expected);
  return Failure(
      StatusCode::kFailedPrecondition, reason::kGradientIncomplete,
      absl::StrCat("micro_batches: expected ", expected, ", got ", held,
                   missing.empty() ? "" : absl::StrCat("; missing: ", missing)),
      {{"expected", absl::StrCat(expected)}, {"held", absl::StrCat(held)}, {"missing", missing}});
}

absl::Status MicroBatchConflict(uint64_t micro_batch) {
  return Failure(StatusCode::kFailedPrecondition, reason::kMicroBatchConflict,
                 absl::StrCat("micro_batch: another one of number ", micro_batch,
                              " was added; number the micro-batches of a step once"),
                 {{"micro_batch", absl::StrCat(micro_batch)}});
}

absl::Status WeightsIncomplete(int64_t missing, absl::string_view first) {
  return Failure(StatusCode::kFailedPrecondition, reason::kWeightsIncomplete,
                 absl::StrCat("weights: ", missing, " parameters have not been put, the first is ",
                              first, "; send them with PutTensors"),
                 {{"missing", absl::StrCat(missing)}, {"first", first}});
}

absl::Status MicroBatchEarly(uint64_t micro_batch, uint64_t next) {
  return WithRetryAfter(
      Failure(StatusCode::kUnavailable, reason::kMicroBatchEarly,
              absl::StrCat("micro_batch: ", micro_batch, " is early, the next is ", next,
                           ", and as many wait as may; send the next one first"),
              {{"micro_batch", absl::StrCat(micro_batch)}, {"next", absl::StrCat(next)}}),
      kComeBack);
}

absl::Status ActivationPressure(absl::string_view message) {
  return WithRetryAfter(
      Failure(StatusCode::kUnavailable, reason::kActivationPressure,
              absl::StrCat("limits.kept_rows: ", message, "; send a Backward first")),
      kComeBack);
}

absl::Status ModulesDraining() {
  return WithRetryAfter(
      Failure(StatusCode::kUnavailable, reason::kDraining,
              "this server is draining: wait for its restart, or take the module to another"),
      absl::Seconds(1));
}

absl::Status SumFailed(absl::string_view why) {
  return Failure(StatusCode::kFailedPrecondition, reason::kSumFailed,
                 absl::StrCat("group: the replicas' gradients were not exchanged: ", why,
                              "; they are as before, so exchange them in a new group, or through "
                              "the workers"));
}

absl::Status OfLayout(absl::Status status) {
  if (status.code() != StatusCode::kInvalidArgument || !ReasonOf(status).empty()) return status;
  return OfField(status.code(), reason::kBadLayout, status.message());
}

absl::Status OfEngine(absl::Status status) {
  if (status.ok() || !ReasonOf(status).empty()) return status;
  switch (status.code()) {
    case StatusCode::kUnimplemented:
      return OfField(status.code(), reason::kModuleUnsupported, status.message());
    case StatusCode::kOutOfRange:
      return OfField(status.code(), reason::kModuleTooLarge, status.message());
    case StatusCode::kResourceExhausted:
      return Failure(status.code(), reason::kModuleQuota, status.message());
    default:
      return Classified(std::move(status));
  }
}

absl::Status OfModuleToken(absl::Status status) {
  status = RenameField(std::move(status), "residual_token", "token");
  if (ReasonOf(status) != reason::kLeaseNotOwned) return status;
  return Failure(StatusCode::kPermissionDenied, reason::kModuleNotOwned,
                 "token: not the token of a module of this caller; register one");
}

}  // namespace attnd
