#include "server/call/status_details.h"

#include <cstdint>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"
#include "proto/google/rpc/status_payload.h"

namespace attnd {
namespace {

void SetPayload(absl::Status& status, absl::string_view url,
                const google::protobuf::Message& message) {
  status.SetPayload(url, absl::Cord(message.SerializeAsString()));
}

google::rpc::ErrorInfo MakeInfo(absl::string_view reason) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain(std::string(kErrorDomain));
  return info;
}

// Lists of values have a length, and each of their entries is a field of its own.
bool NamesShape(absl::string_view field) {
  for (absl::string_view part : {"batch", "heads", "q_len", "kv_len", "head_dim", "shape",
                                 "cu_seqlens", "layout", "offset"}) {
    if (absl::StrContains(field, part)) return true;
  }
  if (absl::EndsWith(field, "slope") || absl::EndsWith(field, "logit")) return true;
  return field == "q" || field == "k" || field == "v" || field == "o";
}

absl::string_view ReasonForField(absl::string_view field) {
  if (absl::EndsWith(field, "element")) return reason::kBadDtype;
  return NamesShape(field) ? reason::kBadShape : reason::kBadField;
}

absl::string_view DefaultReason(absl::StatusCode code, absl::string_view field) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
      return ReasonForField(field);
    case absl::StatusCode::kUnimplemented:
      return field == "problem.mask" ? reason::kMaskUnsupported : reason::kProblemUnsupported;
    case absl::StatusCode::kOutOfRange:
      return absl::StartsWith(field, "problem.mask") ? reason::kMaskTooComplex
                                                     : reason::kTooLargeForDevice;
    case absl::StatusCode::kCancelled:
      return reason::kCancelled;
    default:
      return reason::kEngineFailed;
  }
}

// A field's name has no spaces; a sentence before a colon is no field.
absl::string_view FieldOf(absl::string_view message) {
  size_t colon = message.find(": ");
  if (colon == absl::string_view::npos) return "";
  absl::string_view field = message.substr(0, colon);
  return absl::StrContains(field, ' ') && !absl::StartsWith(field, "problem.") ? "" : field;
}

void AddExpectedAndGot(absl::string_view message, google::rpc::ErrorInfo& info) {
  size_t expected = message.find(": expected ");
  size_t got = message.rfind(", got ");
  if (expected == absl::string_view::npos || got == absl::string_view::npos || got < expected) {
    return;
  }
  size_t begin = expected + absl::string_view(": expected ").size();
  auto& metadata = *info.mutable_metadata();
  metadata["expected"] = std::string(message.substr(begin, got - begin));
  metadata["got"] = std::string(message.substr(got + absl::string_view(", got ").size()));
}

void AddBadRequest(const google::rpc::ErrorInfo& info, const absl::Status& status,
                   google::rpc::Status& out) {
  auto field = info.metadata().find("field");
  if (field == info.metadata().end()) return;
  google::rpc::BadRequest bad;
  auto* violation = bad.add_field_violations();
  violation->set_field(field->second);
  violation->set_description(std::string(status.message()));
  out.add_details()->PackFrom(bad);
}

void AddQuotaFailure(const google::rpc::ErrorInfo& info, const absl::Status& status,
                     google::rpc::Status& out) {
  google::rpc::QuotaFailure failure;
  auto* violation = failure.add_violations();
  auto caller = info.metadata().find("caller");
  if (caller != info.metadata().end()) violation->set_subject(caller->second);
  violation->set_description(std::string(status.message()));
  out.add_details()->PackFrom(failure);
}

// A residual is lost, or shared memory: the message begins with the field.
void AddPreconditionFailure(const google::rpc::ErrorInfo& info, const absl::Status& status,
                            google::rpc::Status& out) {
  google::rpc::PreconditionFailure failure;
  auto* violation = failure.add_violations();
  violation->set_type(info.reason());
  violation->set_subject(std::string(FieldOf(status.message())));
  violation->set_description(std::string(status.message()));
  out.add_details()->PackFrom(failure);
}

}  // namespace

absl::Status Failure(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                     Metadata metadata) {
  absl::Status status(code, message);
  google::rpc::ErrorInfo info = MakeInfo(reason);
  for (const auto& [key, value] : metadata) {
    (*info.mutable_metadata())[std::string(key)] = std::string(value);
  }
  SetPayload(status, kErrorInfoUrl, info);
  return status;
}

absl::Status FieldError(absl::string_view reason, absl::string_view field,
                        absl::string_view expected, absl::string_view got) {
  return Failure(absl::StatusCode::kInvalidArgument, reason,
                 absl::StrCat(field, ": expected ", expected, ", got ", got),
                 {{"field", field}, {"expected", expected}, {"got", got}});
}

absl::Status LeaseLost(absl::string_view cause) {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kLeaseLost,
                 absl::StrCat("residual_token: this lease is gone (", cause, "); send the tensors"),
                 {{"cause", cause}});
}

absl::Status RenameField(absl::Status status, absl::string_view from, absl::string_view to) {
  if (FieldOf(status.message()) != from) return status;
  absl::Status renamed(status.code(), absl::StrCat(to, status.message().substr(from.size())));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { renamed.SetPayload(url, payload); });
  auto info = Payload<google::rpc::ErrorInfo>(renamed, kErrorInfoUrl);
  if (!info.has_value() || !info->metadata().contains("field")) return renamed;
  std::string& field = (*info->mutable_metadata())["field"];
  if (field == from) field = std::string(to);
  SetPayload(renamed, kErrorInfoUrl, *info);
  return renamed;
}

absl::Status Classified(absl::Status status) {
  if (status.ok() || !ReasonOf(status).empty()) return status;
  // A failure of the engine ("cuLaunchKernel: ...") names no field of the request.
  absl::string_view field = absl::IsInternal(status) ? "" : FieldOf(status.message());
  google::rpc::ErrorInfo info = MakeInfo(DefaultReason(status.code(), field));
  if (!field.empty()) (*info.mutable_metadata())["field"] = std::string(field);
  AddExpectedAndGot(status.message(), info);
  SetPayload(status, kErrorInfoUrl, info);
  return status;
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo retry;
  int64_t nanos = absl::ToInt64Nanoseconds(delay);
  retry.mutable_retry_delay()->set_seconds(nanos / 1000000000);
  retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanos % 1000000000));
  SetPayload(status, kRetryInfoUrl, retry);
  return status;
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  auto retry = Payload<google::rpc::RetryInfo>(status, kRetryInfoUrl);
  if (!retry.has_value()) return std::nullopt;
  return absl::Seconds(retry->retry_delay().seconds()) +
         absl::Nanoseconds(retry->retry_delay().nanos());
}

std::string ReasonOf(const absl::Status& status) {
  if (status.ok()) return "";
  auto info = Payload<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  return info.has_value() ? info->reason() : "";
}

grpc::Status ToGrpcStatus(const absl::Status& unclassified) {
  if (unclassified.ok()) return grpc::Status::OK;
  absl::Status status = Classified(unclassified);
  google::rpc::Status out;
  out.set_code(static_cast<int>(status.code()));
  out.set_message(std::string(status.message()));
  auto info = *Payload<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  out.add_details()->PackFrom(info);
  AddBadRequest(info, status, out);
  auto retry = Payload<google::rpc::RetryInfo>(status, kRetryInfoUrl);
  if (retry.has_value()) out.add_details()->PackFrom(*retry);
  if (status.code() == absl::StatusCode::kResourceExhausted) AddQuotaFailure(info, status, out);
  if (absl::IsFailedPrecondition(status)) AddPreconditionFailure(info, status, out);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), out.message(),
                      out.SerializeAsString());
}

}  // namespace attnd
