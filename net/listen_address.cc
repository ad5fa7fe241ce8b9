#include "net/listen_address.h"

#include <arpa/inet.h>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace attnd {

bool IsUnixAddress(absl::string_view address) {
  return absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:");
}

std::string UnixPath(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return "";
  absl::ConsumePrefix(&address, "//");
  return std::string(address);
}

bool IsLoopbackAddress(absl::string_view address) {
  if (IsUnixAddress(address)) return true;
  const std::string host(address.substr(0, address.rfind(':')));
  in_addr ip4 = {};  // not by its text: 127.example.org is a name like any other
  bool loopback4 = inet_pton(AF_INET, host.c_str(), &ip4) == 1 && ntohl(ip4.s_addr) >> 24 == 127;
  return loopback4 || host == "localhost" || host == "[::1]" || host == "::1";
}

bool ServesOtherHosts(const std::vector<std::string>& addresses) {
  return !absl::c_all_of(addresses, IsLoopbackAddress);
}

}  // namespace attnd
