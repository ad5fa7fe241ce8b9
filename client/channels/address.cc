#include "client/channels/address.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr size_t kMaxSocketPathBytes = 107;  // sockaddr_un has 108, the last of which is 0

// "path", or "///path" with an authority that is empty.
bool IsSocketPath(absl::string_view path) {
  const bool has_authority = absl::ConsumePrefix(&path, "//");
  return !path.empty() && path.size() <= kMaxSocketPathBytes && (!has_authority || path[0] == '/');
}

bool IsTarget(absl::string_view address) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(address, absl::MaxSplits(':', 1));
  const auto& [scheme, rest] = parts;
  if (scheme == "unix") return IsSocketPath(rest);
  if (scheme == "unix-abstract") return !rest.empty() && rest.size() <= kMaxSocketPathBytes;
  if (scheme == "ipv4" || scheme == "ipv6") {
    const std::vector<absl::string_view> each = absl::StrSplit(rest, ',');
    return std::all_of(each.begin(), each.end(), &IsHostAndPort);
  }
  constexpr absl::string_view kNames[] = {"dns", "xds", "srv", "dir", "file"};
  return std::find(std::begin(kNames), std::end(kNames), scheme) != std::end(kNames) &&
         !rest.empty();
}

}  // namespace

absl::Status CheckAddress(absl::string_view address) {
  if (IsHostAndPort(address) || IsTarget(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("expected host:port, unix:path (at most ", kMaxSocketPathBytes,
                   " bytes) or a gRPC target, got \"", address, "\""));
}

bool IsHostAndPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view digits = address.substr(colon + 1);
  int port = 0;
  return absl::c_all_of(digits, absl::ascii_isdigit) && absl::SimpleAtoi(digits, &port) &&
         port >= 1 && port <= 65535 &&
         address.substr(0, colon).find_first_of("/, ") == absl::string_view::npos;
}

}  // namespace attnd
