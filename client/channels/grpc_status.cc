#include "client/channels/grpc_status.h"

#include <cstdint>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "proto/google/rpc/status.pb.h"

namespace attnd {
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

std::optional<absl::Duration> QueueOf(const grpc::ClientContext& finished_call) {
  const auto& trailers = finished_call.GetServerTrailingMetadata();
  auto it = trailers.find("attnd-queue-seconds");
  double seconds = 0;
  if (it == trailers.end() ||
      !absl::SimpleAtod(absl::string_view(it->second.data(), it->second.size()), &seconds) ||
      !(seconds >= 0)) {
    return std::nullopt;
  }
  return absl::Seconds(seconds);
}

}  // namespace attnd
