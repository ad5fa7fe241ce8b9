#include "client/cpp/grpc_status.h"

#include <cstdint>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "client/cpp/error_detail.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"
#include "proto/google/rpc/status_payload.h"

namespace attnd {
namespace {

absl::Duration ToDuration(const google::protobuf::Duration& d) {
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return out;
  for (const google::protobuf::Any& any : details.details()) {
    out.SetPayload(any.type_url(), absl::Cord(any.value()));
  }
  return out;
}

Pushback PushbackOf(const grpc::ClientContext& finished_call) {
  const auto& trailers = finished_call.GetServerTrailingMetadata();
  auto it = trailers.find("grpc-retry-pushback-ms");
  if (it == trailers.end()) return {};
  int64_t milliseconds;
  if (!absl::SimpleAtoi(absl::string_view(it->second.data(), it->second.size()), &milliseconds) ||
      milliseconds < 0) {
    return {.forbids_retry = true};
  }
  return {.delay = absl::Milliseconds(milliseconds)};
}

std::optional<ErrorDetail> DetailOf(const absl::Status& status) {
  auto info = Payload<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  if (!info.has_value()) return std::nullopt;
  ErrorDetail detail{info->reason(), info->domain(), {}, std::nullopt};
  detail.metadata.insert(info->metadata().begin(), info->metadata().end());
  auto retry = Payload<google::rpc::RetryInfo>(status, kRetryInfoUrl);
  if (retry.has_value()) detail.retry_delay = ToDuration(retry->retry_delay());
  return detail;
}

}  // namespace attnd
