#include "client/types/error_detail.h"

#include "absl/algorithm/container.h"
#include "absl/strings/cord.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status_payload.h"

namespace attnd {
namespace {

absl::Duration ToDuration(const google::protobuf::Duration& d) {
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

}  // namespace

std::optional<ErrorDetail> DetailOf(const absl::Status& status) {
  auto info = Payload<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  if (!info.has_value()) return std::nullopt;
  ErrorDetail detail{info->reason(), info->domain(), {}, std::nullopt};
  detail.metadata.insert(info->metadata().begin(), info->metadata().end());
  auto retry = Payload<google::rpc::RetryInfo>(status, kRetryInfoUrl);
  if (retry.has_value()) detail.retry_delay = ToDuration(retry->retry_delay());
  return detail;
}

bool HasReason(const absl::Status& status, std::initializer_list<absl::string_view> reasons) {
  const std::optional<ErrorDetail> detail = DetailOf(status);
  return detail.has_value() && absl::c_linear_search(reasons, detail->reason);
}

absl::Status WithReason(absl::Status status, absl::string_view reason,
                        const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("attnd");
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

}  // namespace attnd
