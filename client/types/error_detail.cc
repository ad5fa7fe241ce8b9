#include "client/types/error_detail.h"

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

}  // namespace attnd
