#include "client/cpp/address.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

bool IsHostAndPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  int port = 0;
  return absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 1 && port <= 65535 &&
         address.substr(0, colon).find_first_of("/ ") == absl::string_view::npos;
}

bool IsTarget(absl::string_view address) {
  const size_t colon = address.find(':');
  for (absl::string_view scheme : {"unix", "unix-abstract", "dns", "ipv4", "ipv6", "xds"}) {
    if (address.substr(0, colon) == scheme) {
      return colon != absl::string_view::npos && colon + 1 < address.size();
    }
  }
  return false;
}

}  // namespace

absl::Status CheckAddress(absl::string_view address) {
  if (IsHostAndPort(address) || IsTarget(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected host:port, unix:path or a gRPC target, got \"", address, "\""));
}

}  // namespace attnd
