#include "client/channels/grpc_status.h"

#include <cstdint>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "proto/google/rpc/status.pb.h"

namespace attnd {
namespace {

// A number of 0 and above in a trailer.
std::optional<double> NumberIn(const grpc::ClientContext& finished_call, const char* key) {
  const auto& trailers = finished_call.GetServerTrailingMetadata();
  const auto it = trailers.find(key);
  double number = 0;
  if (it == trailers.end() ||
      !absl::SimpleAtod(absl::string_view(it->second.data(), it->second.size()), &number) ||
      !(number >= 0)) {
    return std::nullopt;
  }
  return number;
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

std::optional<absl::Duration> QueueOf(const grpc::ClientContext& finished_call) {
  const std::optional<double> seconds = NumberIn(finished_call, "attnd-queue-seconds");
  if (!seconds.has_value()) return std::nullopt;
  return absl::Seconds(*seconds);
}

std::optional<ReportedLoad> ReportedLoadOf(const grpc::ClientContext& finished_call) {
  const std::optional<double> seconds = NumberIn(finished_call, "attnd-module-queue-seconds");
  const std::optional<double> memory = NumberIn(finished_call, "attnd-module-memory");
  if (!seconds.has_value() || !memory.has_value()) return std::nullopt;
  return ReportedLoad{*seconds, *memory};
}

}  // namespace attnd
