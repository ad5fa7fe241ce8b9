#include "client/channels/proxy.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/channels/address.h"

namespace attnd {
namespace {

// "http://user:password@host:port" → "host:port"; empty for another scheme.
absl::string_view HostOf(absl::string_view url) {
  if (!absl::ConsumePrefix(&url, "http://")) return "";
  absl::ConsumeSuffix(&url, "/");
  return url.substr(url.rfind('@') + 1);  // npos + 1 is 0
}

absl::StatusOr<Proxy> Parse(absl::string_view url, absl::string_view origin) {
  const absl::string_view host = HostOf(url);
  if (!IsHostAndPort(host)) {
    const absl::string_view safe = url.substr(url.rfind('@') + 1);
    return absl::InvalidArgumentError(
        absl::StrCat("proxy: expected http://host:port", origin, ", got \"", safe, "\""));
  }
  return Proxy{std::string(url), absl::StrCat("http://", host, origin)};
}

}  // namespace

absl::StatusOr<Proxy> ProxyOf(const std::string& option) {
  if (option.empty()) return Proxy();
  if (option != "environment") return Parse(option, "");
  for (const char* variable : {"grpc_proxy", "https_proxy", "http_proxy"}) {
    const char* url = std::getenv(variable);
    if (url != nullptr && *url != '\0') return Parse(url, absl::StrCat(" (", variable, ")"));
  }
  return Proxy();
}

}  // namespace attnd
