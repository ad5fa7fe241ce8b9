// The details of an error as payloads of absl::Status: serialised google.rpc messages under their
// type URLs, as they stand in grpc-status-details-bin. Server and client read them alike.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace attnd {

inline constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
inline constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";

// Nothing when the status has no such payload, or one that cannot be parsed.
template <class Message>
std::optional<Message> Payload(const absl::Status& status, absl::string_view url) {
  absl::optional<absl::Cord> cord = status.GetPayload(url);
  Message message;
  if (!cord.has_value() || !message.ParseFromString(std::string(*cord))) return std::nullopt;
  return message;
}

}  // namespace attnd
