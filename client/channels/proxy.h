// ProxyOf: ClientOptions::proxy → the HTTP proxy through which channels connect. Without the option
// there is none: gRPC alone would obey http_proxy, and lead calls for a private address to a proxy
// that does not know it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace attnd {

struct Proxy {
  std::string url;    // "http://[user:password@]host:port"; empty: none
  std::string shown;  // the same for messages: without the password, with the variable that has it
};

// `option` is ClientOptions::proxy; "environment" reads grpc_proxy, https_proxy and http_proxy, the
// first that is set, now. INVALID_ARGUMENT for what is no such URL. gRPC looks at no_proxy itself.
absl::StatusOr<Proxy> ProxyOf(const std::string& option);

}  // namespace attnd
